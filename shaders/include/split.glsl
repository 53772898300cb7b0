// The parts of one item that the splits of its keys leave, and their merge by the last workgroup to finish.
// Includer must define ROWS, the buffers parts (vec4), tickets (uint), outputs and lse, and include query_out.glsl; where
// a workgroup merges, also THREADS (its size) and a shared array WAY_SUMS of THREADS vec4s or more. With MERGE_SHUFFLED the
// merge is that of merge_shuffled.glsl.
#ifndef VKATTN_SPLIT
#define VKATTN_SPLIT
#include "write_out.glsl"

const float LOWEST = -3.4028235e38;  // row_max starts finite: minus infinity less it is never NaN
const uint NOT_A_NUMBER = 0x7FC00000u;
const float HIGHEST_SUM = 1.0e30;    // far beyond any number of keys: e^NaN may be infinity, and so may ln NaN
#ifndef FLYING
#define FLYING 8u  // parts on the way at once to an invocation
#endif

#ifdef WAY_SUMS
shared uint ticket;
#ifndef MERGE_SHUFFLED
shared vec2 way_state[THREADS];
#endif
#endif

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

// By one invocation.
void write_lse(RowTile tile, uint row, vec2 whole) {
    if ((flags() & FLAG_LSE) == 0u) return;
    vec2 state = with_sink(tile, row, whole);
    uint lse_row = (q_len() + 3u) & ~3u, token = row_token(row);
    uint at = push.lse_base + (tile.b * num_kv_heads() * group_size() + row_head(tile, row)) * lse_row + token;
    float finite_lse = state.y < HIGHEST_SUM ? state.x + log(state.y) : uintBitsToFloat(NOT_A_NUMBER);
    lse[at] = state.y == 0.0 ? uintBitsToFloat(MINUS_INFINITY) : finite_lse;
    for (uint pad = token + 1u; token + 1u == q_len() && pad < lse_row; ++pad) lse[at + pad - token] = 0.0;
}

#ifdef WAY_SUMS
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
#endif

#ifndef MERGE_SHUFFLED
// One vec of a row, and the row's state: every `ways`-th part from part `way` on, with independent loads in flight.
vec2 merge_vec(uint at, uint e, uint way, uint ways, out vec4 sum) {
    uint splits = num_splits(), step = uint(ROWS) * (1u + value_vecs());
    vec2 state = vec2(LOWEST, 0.0);
    sum = vec4(0.0);
    for (uint s = way; s < splits; s += FLYING * ways) {
        vec4 x[FLYING];
        vec2 part[FLYING];
        float new_max = state.x;
        [[unroll]] for (uint t = 0u; t < FLYING; ++t) {
            uint from = at + min(s + t * ways, splits - 1u) * step;
            part[t] = parts[from].xy;
            x[t] = parts[from + 1u + e];
        }
        [[unroll]] for (uint t = 0u; t < FLYING; ++t) new_max = max(new_max, part[t].x);
        float shrink = exp(state.x - new_max);
        state = vec2(new_max, state.y * shrink);
        sum *= shrink;
        [[unroll]] for (uint t = 0u; t < FLYING; ++t) {
            float weight = exp(part[t].x - new_max);
            if (s + t * ways < splits && part[t].y != 0.0) {  // an empty part holds nothing
                state.y = fma(part[t].y, weight, state.y);
                if (weight > 0.0) sum = fma(x[t], vec4(weight), sum);
            }
        }
    }
    return state;
}

#ifdef WAY_SUMS
// Merge all splits of the item's rows. Where there are fewer output vecs than invocations, several share one.
void merge_parts(RowTile tile, uint item) {
    uint lane = gl_LocalInvocationIndex, rows = min(tile.rows - tile.first, uint(ROWS)), vecs = rows * out_vecs();
    uint ways = max(THREADS / vecs, 1u);
    for (uint first = 0u; first < vecs; first += THREADS) {  // once, if there are several ways
        uint i = first + (ways > 1u ? lane % vecs : lane), way = ways > 1u ? lane / vecs : 0u;
        uint r = i / out_vecs(), e = i % out_vecs();
        bool is_live = i < vecs && way < ways;
        vec4 sum = vec4(0.0);
        vec2 whole = vec2(LOWEST, 0.0);
        if (is_live) whole = merge_vec(part_index(item, 0u, r), min(e, value_vecs() - 1u), way, ways, sum);
        if (ways > 1u) {
            WAY_SUMS[lane] = sum;
            way_state[lane] = whole;
            barrier();
            for (uint w = 1u; way == 0u && w < ways; ++w) {
                vec2 other = way_state[lane + w * vecs], both = merged(whole, other);
                sum = sum * exp(whole.x - both.x) + WAY_SUMS[lane + w * vecs] * exp(other.x - both.x);
                whole = both;
            }
        }
        if (is_live && way == 0u) {
            write_out(tile, tile.first + r, e, e < value_vecs() ? sum : vec4(0.0), whole);
            if (e == 0u) write_lse(tile, tile.first + r, whole);
        }
    }
    barrier();
}
#endif
#endif
#endif
