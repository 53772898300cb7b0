// The parts of one item that the splits of its keys leave, and their merge by the last workgroup to finish.
// Includer must define ROWS, THREADS (the size of a workgroup), QUERY and out_words, and the buffers parts (vec4), tickets (uint), outputs and lse.
#ifndef VKATTN_SPLIT
#define VKATTN_SPLIT

const float LOWEST = -3.4028235e38;  // row_max starts finite: minus infinity less it is never NaN
const uint MAX_SPLITS = 128u;        // parts of one row at most

shared float split_weight[MAX_SPLITS];
shared vec4 merge_sums[THREADS];
shared vec2 merge_state;
shared uint ticket;

// Two (row_max, row_sum) as one.
vec2 merged(vec2 a, vec2 b) {
    float row_max = max(a.x, b.x);
    return vec2(row_max, a.y * exp(a.x - row_max) + b.y * exp(b.x - row_max));
}

uint part_index(uint item, uint split, uint r) {
    return push.parts_base + ((item * num_splits() + split) * uint(ROWS) + r) * (1u + value_vecs());
}

// The row's state with the sink in its denominator, once.
vec2 with_sink(RowTile tile, uint row, vec2 whole) {
    if ((flags() & FLAG_SINKS) == 0u) return whole;
    return merged(whole, vec2(sink(row_head(tile, row)), 1.0));
}

// Write vec e of an output row from its sum relative to whole.x.
void write_out(RowTile tile, uint row, uint e, vec4 sum, vec2 whole) {
    vec2 state = with_sink(tile, row, whole);
    float factor = state.y > 0.0 ? exp(whole.x - state.x) / state.y : 0.0;
    outputs[push.out_base + tile.b * out_stride_batch() + row_head(tile, row) * out_stride_head()
            + row_token(row) * out_stride_row() + e] = out_words(whole.y > 0.0 ? sum * factor : vec4(0.0));
}

void write_lse(RowTile tile, uint row, vec2 whole) {
    if ((flags() & FLAG_LSE) == 0u || gl_LocalInvocationIndex != 0u) return;
    vec2 state = with_sink(tile, row, whole);
    uint lse_row = (q_len() + 3u) & ~3u, token = row_token(row);
    uint at = push.lse_base + (tile.b * num_kv_heads() * group_size() + row_head(tile, row)) * lse_row + token;
    lse[at] = state.y > 0.0 ? state.x + log(state.y) : uintBitsToFloat(MINUS_INFINITY);
    for (uint pad = token + 1u; token + 1u == q_len() && pad < lse_row; ++pad) lse[at + pad - token] = 0.0;
}

// Whether this workgroup is the last of the item's splits; the same answer in the whole workgroup. The ticket counter
// is 0 again when the last one has come.
bool is_last(uint item) {
    memoryBarrierBuffer();
    barrier();
    if (gl_LocalInvocationIndex == 0u) {
        ticket = atomicAdd(tickets[push.tickets_base + item], 1u);
        if (ticket + 1u == num_splits()) tickets[push.tickets_base + item] = 0u;
    }
    barrier();
    memoryBarrierBuffer();
    return ticket + 1u == num_splits();
}

// Merge all splits of each row of the item: weights first, then sums with independent loads in flight.
void merge_parts(RowTile tile, uint item) {
    uint lane = gl_LocalInvocationIndex;
    uint width = 1u;  // invocations side by side in a row of values: a power of two
    while (width < value_vecs() && width < THREADS) width *= 2u;
    uint x = lane % width, y = lane / width, deep = THREADS / width;
    for (uint r = 0u; r < uint(ROWS) && tile.first + r < tile.rows; ++r) {
        barrier();
        for (uint s = lane; s < num_splits(); s += THREADS) split_weight[s] = parts[part_index(item, s, r)].x;
        barrier();
        float row_max = LOWEST;
        for (uint s = 0u; s < num_splits(); ++s) row_max = max(row_max, split_weight[s]);
        barrier();
        float own_sum = 0.0;
        for (uint s = lane; s < num_splits(); s += THREADS) {
            vec4 state = parts[part_index(item, s, r)];
            split_weight[s] = state.y > 0.0 ? exp(state.x - row_max) : 0.0;
            own_sum += state.y * split_weight[s];
        }
        merge_sums[lane].x = own_sum;
        barrier();
        if (lane == 0u) {
            float row_sum = 0.0;
            for (uint i = 0u; i < THREADS; ++i) row_sum += merge_sums[i].x;
            merge_state = vec2(row_max, row_sum);
        }
        barrier();
        for (uint e0 = 0u; e0 < out_vecs(); e0 += width) {
            uint e = e0 + x;
            vec4 sum = vec4(0.0);
            if (e < value_vecs()) {
                uint at = part_index(item, 0u, r) + 1u + e, step = uint(ROWS) * (1u + value_vecs());
                for (uint s = y; s < num_splits(); s += deep)
                    if (split_weight[s] > 0.0) sum = fma(parts[at + s * step], vec4(split_weight[s]), sum);
            }
            merge_sums[lane] = sum;
            barrier();
            if (y == 0u && e < out_vecs()) {
                for (uint other = 1u; other < deep; ++other) sum += merge_sums[other * width + x];
                write_out(tile, tile.first + r, e, sum, merge_state);
            }
            barrier();
        }
        write_lse(tile, tile.first + r, merge_state);
    }
}
#endif
