// The parts of one item that the splits of its keys leave, and their merge by the last workgroup to finish.
// Includer must define ROWS, THREADS (the size of a workgroup), QUERY, and the buffers parts (vec4), tickets (uint), outputs and lse.
#ifndef VKATTN_SPLIT
#define VKATTN_SPLIT
#include "write_out.glsl"

const float LOWEST = -3.4028235e38;  // row_max starts finite: minus infinity less it is never NaN
const uint NOT_A_NUMBER = 0x7FC00000u;
const float HIGHEST_SUM = 1.0e30;    // far beyond any number of keys: e^NaN may be infinity, and so may ln NaN
const uint MAX_SPLITS = 128u;        // parts of one row at most

shared vec2 part_state[uint(ROWS) * MAX_SPLITS];  // (row_max, row_sum) of each part
shared vec2 share_state[THREADS];
shared vec2 row_state[ROWS];
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
    float factor = state.y == 0.0 ? 0.0 : exp(whole.x - state.x) / state.y;  // NaN stays NaN
    write_output(push.out_base + tile.b * out_stride_batch() + row_head(tile, row) * out_stride_head()
                 + row_token(row) * out_stride_row() + e, whole.y == 0.0 ? vec4(0.0) : sum * factor);
}

void write_lse(RowTile tile, uint row, vec2 whole) {
    if ((flags() & FLAG_LSE) == 0u || gl_LocalInvocationIndex != 0u) return;
    vec2 state = with_sink(tile, row, whole);
    uint lse_row = (q_len() + 3u) & ~3u, token = row_token(row);
    uint at = push.lse_base + (tile.b * num_kv_heads() * group_size() + row_head(tile, row)) * lse_row + token;
    float finite_lse = state.y < HIGHEST_SUM ? state.x + log(state.y) : uintBitsToFloat(NOT_A_NUMBER);
    lse[at] = state.y == 0.0 ? uintBitsToFloat(MINUS_INFINITY) : finite_lse;
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

// Merge all splits of the item's rows: their states first, then each output vec with independent loads in flight.
void merge_parts(RowTile tile, uint item) {
    uint lane = gl_LocalInvocationIndex, splits = num_splits(), rows = min(tile.rows - tile.first, uint(ROWS));
    for (uint i = lane; i < rows * splits; i += THREADS) {
        vec4 state = parts[part_index(item, i % splits, i / splits)];
        part_state[i] = state.xy;
    }
    barrier();
    const uint SHARE = THREADS / uint(ROWS);  // invocations that go through the states of one row
    uint own_row = lane / SHARE;
    vec2 own = vec2(LOWEST, 0.0);
    if (own_row < rows)
        for (uint s = lane % SHARE; s < splits; s += SHARE) own = merged(own, part_state[own_row * splits + s]);
    share_state[lane] = own;
    barrier();
    if (lane < rows) {
        vec2 whole = vec2(LOWEST, 0.0);
        for (uint i = 0u; i < SHARE; ++i) whole = merged(whole, share_state[lane * SHARE + i]);
        row_state[lane] = whole;
    }
    barrier();
    for (uint i = lane; i < rows * splits; i += THREADS)  // from here on part_state.x is the weight of a part
        part_state[i].x = part_state[i].y > 0.0 ? exp(part_state[i].x - row_state[i / splits].x) : 0.0;
    barrier();
    uint step = uint(ROWS) * (1u + value_vecs());
    for (uint i = lane; i < rows * out_vecs(); i += THREADS) {
        uint r = i / out_vecs(), e = i % out_vecs();
        vec4 sum = vec4(0.0);
        if (e < value_vecs()) {
            uint at = part_index(item, 0u, r) + 1u + e;
            for (uint s = 0u; s < splits; s += 4u) {
                vec4 x[4];
                [[unroll]] for (uint t = 0u; t < 4u; ++t) x[t] = parts[at + min(s + t, splits - 1u) * step];
                [[unroll]] for (uint t = 0u; t < 4u; ++t) {
                    float weight = s + t < splits ? part_state[r * splits + s + t].x : 0.0;
                    if (weight > 0.0) sum = fma(x[t], vec4(weight), sum);
                }
            }
        }
        write_out(tile, tile.first + r, e, sum, row_state[r]);
    }
    for (uint r = 0u; r < rows; ++r) write_lse(tile, tile.first + r, row_state[r]);
    barrier();
}
#endif
