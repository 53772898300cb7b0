// Purpose   decode and other short queries over quantised keys and values, multiplied on matrix units
// Maths     as attn_split_quant_subgroup. Codes are exact in half precision. A query, and a weight (with a value's
//           scale in it), is two halves, the leading 11 bits and what they leave: each row takes two columns of a
//           matrix, and sums are float32. Before that, queries and weights are multiplied by powers of two that suit a
//           half
// Bindings  as attn_split_quant_subgroup
// Grid      any number of workgroups of THREADS; each takes one (item, split) after another. A subgroup takes tiles of
//           16 keys on its own: keys by queries, weights, values by weights, with the next ones on the way. Invocation
//           4 g + t has the scores of keys g and g + 8, the state and the sums of row t
// Spec      THREADS: invocations of a workgroup; FULL_ROWS: 1 if head_dim and value_dim are WIDTH, so that places in a
//           row are constants. BATCH_SIZE, NUM_KV_HEADS, GROUP_SIZE, Q_LEN, HEAD_VECS, VALUE_VECS, OUT_VECS: as in the
//           params block, or 0
// Push      params_base (words); query_base, out_base (vecs); key_base, value_base (quads); mask_base, tickets_base,
//           lse_base (words); parts_base (vec4s)
// Bounds    only keys in the union of the rows' visible ranges are read, and scales of those. An empty split
//           contributes nothing. Codes are finite whatever they are, and a scale of a key without weight is left out
// Requires  matrices of 16 x 8 x 16 at subgroup scope, subgroups of 32, and the order of elements in
//           include/lane_matrices.glsl, which the self-test finds out
// Source    Flash-Decoding (Dao et al. 2023); Milakov and Gimelshein 2018
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#if !defined(EMULATED)
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_KHR_shader_subgroup_vote : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#endif

layout(local_size_x = 128, local_size_x_id = 0) in;
layout(constant_id = 0) const uint THREADS = 128u;
layout(constant_id = 1) const uint FULL_ROWS = 0u;
layout(constant_id = 2) const uint BATCH_SIZE = 0u;  // these seven 0: what the params block says
layout(constant_id = 3) const uint NUM_KV_HEADS = 0u;
layout(constant_id = 4) const uint GROUP_SIZE = 0u;
layout(constant_id = 5) const uint Q_LEN = 0u;
layout(constant_id = 6) const uint HEAD_VECS = 0u;
layout(constant_id = 7) const uint VALUE_VECS = 0u;
layout(constant_id = 8) const uint OUT_VECS = 0u;
#define CONSTANT_SIZES
const bool FULL = FULL_ROWS != 0u;
layout(push_constant) uniform Push {
    uint params_base;
    uint query_base;
    uint key_base;
    uint value_base;
    uint mask_base;
    uint parts_base;
    uint tickets_base;
    uint out_base;
    uint lse_base;
} push;

#define QUERY_ANY
#include "query_out.glsl"
#define ROWS 4
#define BLOCK_ROWS uint(ROWS)
#if defined(WIDTH_D64)
#define WIDTH 64
#elif defined(WIDTH_D128)
#define WIDTH 128
#endif
// Keys and values as their invocations take them, and how many units of a row are an invocation's.
#if defined(KEY_INT8)
#define KEY_UNIT uvec4
#define KEY_UNITS (WIDTH / 64)
#elif defined(KEY_Q8_0)
#define KEY_UNIT uvec2
#define KEY_UNIT_BYTES 8u
#define KEY_UNITS (WIDTH / 32)
#define BLOCK_WORDS 8u
#define BLOCK_BYTES 32
#elif defined(KEY_Q4_0)
#define KEY_UNIT uint
#define KEY_UNIT_BYTES 4u
#define KEY_UNITS (WIDTH / 32)
#define BLOCK_WORDS 4u
#define BLOCK_BYTES 16
#endif
#if defined(KEY_INT8) && WIDTH == 128
#define VALUE_UNIT uvec4
#define VALUE_UNITS 1
#define VALUE_WORD(v, i, b) v.unit[i][b]
#else
#define VALUE_UNIT uint
#define VALUE_UNITS (WIDTH / 32)
#define VALUE_WORD(v, i, b) v.unit[(i) * VALUE_UNITS + (b)]
#endif

#include "params.glsl"
layout(set = 0, binding = 1) restrict readonly buffer Query { QUERY query[]; };
layout(set = 0, binding = 2) restrict readonly buffer Key { KEY_UNIT key[]; };
#if !defined(KEY_INT8)
// Views that start 1, 2 and 3 blocks later: block b of a row is where block 0 is, by a constant.
#define LATER(b) layout(offset = (b) * BLOCK_BYTES)
layout(set = 0, binding = 2) restrict readonly buffer Key1 { LATER(1) KEY_UNIT key_1[]; };
layout(set = 0, binding = 2) restrict readonly buffer Key2 { LATER(2) KEY_UNIT key_2[]; };
layout(set = 0, binding = 2) restrict readonly buffer Key3 { LATER(3) KEY_UNIT key_3[]; };
layout(set = 0, binding = 3) restrict readonly buffer Value1 { LATER(1) VALUE_UNIT value_1[]; };
layout(set = 0, binding = 3) restrict readonly buffer Value2 { LATER(2) VALUE_UNIT value_2[]; };
layout(set = 0, binding = 3) restrict readonly buffer Value3 { LATER(3) VALUE_UNIT value_3[]; };
#endif
layout(set = 0, binding = 2) restrict readonly buffer KeyScales { uvec2 key_scales[]; };
layout(set = 0, binding = 3) restrict readonly buffer Value { VALUE_UNIT value[]; };
layout(set = 0, binding = 3) restrict readonly buffer ValueScales { uvec2 value_scales[]; };
layout(set = 0, binding = 4) restrict readonly buffer Mask { uint mask_data[]; };
layout(set = 0, binding = 5) coherent buffer Parts { vec4 parts[]; };
layout(set = 0, binding = 6) coherent buffer Tickets { uint tickets[]; };
layout(set = 0, binding = 7) coherent writeonly buffer Out { QUERY outputs[]; };
layout(set = 0, binding = 8) coherent writeonly buffer Lse { float lse[]; };
#include "read_query.glsl"
#include "tiles.glsl"
#include "score.glsl"

shared vec4 sums[THREADS * WIDTH / 32];  // of each subgroup and row: WIDTH / 4
#define WAY_SUMS sums
#include "split.glsl"
#include "lane_matrices.glsl"
#include "code_matrices.glsl"
shared uvec4 query_words[WIDTH];          // of a pair of steps and an invocation
shared vec2 group_state[THREADS / 32u * ROWS];  // (row_max, row_sum) of each subgroup and row
shared ScoreRule rule;                          // these two not in registers, of which there are few
shared ScoreRow score_rows[ROWS];

// One row's state in its invocations; row_sum is that of an invocation's own keys. Weights and sums of values are
// multiplied by norm, a power of two: weights up to `limit` then fit a half, and few of them are small ones.
struct State {
    float row_max, row_sum, norm, limit;
};

// x is at least 2^e and less than 2^(e + 1).
int exponent_of(float x) { return int(floatBitsToUint(x) >> 23) - 127; }
float power_of_2(int e) { return e < -126 ? 0.0 : uintBitsToFloat(uint(min(e, 127) + 127) << 23); }

// Of numbers for column g: their leading bits where it is even, else what these leave.
HALF2 own_part(vec2 x) {
    vec2 high = leading(x), rest = mix(x - high, vec2(0.0), isinf(high));
    return rounded((g() & 1u) == 0u ? high : rest);
}

// In blocks norm is in w already, as there is one of them for each.
#if defined(BLOCKS)
#define NORM_IN_WEIGHTS state.norm
#define LIMIT 32768.0
#else
#define NORM_IN_WEIGHTS 1.0
#define LIMIT state.limit
#endif

#define SHRINK_SUMS(factor)                \
    UNROLL for (uint i = 0u; i < STEPS; ++i) \
        UNROLL for (uint c = 0u; c < 4u; ++c) PART(acc[i], c) *= factor;

// The maximum over the invocations of row t.
#define MAX_OF_ROW(x) \
    UNROLL for (uint step = 4u; step < 32u; step *= 2u) x = max(x, shuffle_float(x, LANE ^ step));

// Lets the maximum of row t take in new scores (rare, once there have been a few): its sums shrink.
#define RAISE_MAXIMUM                                              \
    {                                                              \
        float new_max = max(state.row_max, max(s[0], s[1]));       \
        MAX_OF_ROW(new_max)                                        \
        float shrink = exp(state.row_max - new_max);               \
        state.row_max = new_max;                                   \
        state.row_sum *= shrink;                                   \
        SHRINK_SUMS(shrink)                                        \
    }

// Chooses norm anew (rare): the largest weight becomes [2^11, 2^12), unless sums would become larger than 2^60.
#define CHOOSE_NORM(largest)                                                                     \
    {                                                                                            \
        float most = 0.0;                                                                        \
        UNROLL for (uint i = 0u; i < STEPS; ++i)                                                 \
            UNROLL for (uint c = 0u; c < 4u; ++c) most = max(most, abs(PART(acc[i], c)));        \
        MAX_OF_ROW(most)                                                                         \
        MAX_OF_ROW(largest)                                                                      \
        int wanted = clamp(11 - exponent_of(largest) + exponent_of(NORM_IN_WEIGHTS), -100, 100); \
        float factor = power_of_2(min(wanted - exponent_of(state.norm), 60 - exponent_of(most))); \
        state.norm *= factor;                                                                    \
        state.limit = 32768.0 / state.norm;                                                      \
        SHRINK_SUMS(factor)                                                                      \
    }

#include "attend_matrices.glsl"

// Notes what the scores of an item depend on; returns whether, for all its rows, that is the scale alone.
bool prepare_scores(RowTile tile, uint begin, uint end) {
    ScoreRule own_rule = score_rule();
    bool plain = true;
    for (uint r = 0u; r < min(tile.rows - tile.first, uint(ROWS)); ++r)
        plain = plain && is_plain(own_rule, score_row(tile, tile.first + r), begin, end - 1u);
    if (gl_LocalInvocationIndex < ROWS)
        score_rows[gl_LocalInvocationIndex] = score_row(tile, tile.first + gl_LocalInvocationIndex);
    if (gl_LocalInvocationIndex == 0u) rule = own_rule;
    barrier();
    return plain;
}

// The states and sums of all subgroups as one, as parts or, where there is one split, as the result.
void finish(RowTile tile, uint item, uint split, State state, SUMS acc[STEPS]) {
    float row_sum = state.row_sum;
    UNROLL for (uint step = 4u; step < 32u; step *= 2u) row_sum += shuffle_float(row_sum, LANE ^ step);
    if (g() == 0u) group_state[SUBGROUP * ROWS + t()] = vec2(state.row_max, row_sum);
    UNROLL for (uint b = 0u; b < WORDS; ++b)
        sums[(SUBGROUP * ROWS + t()) * (WIDTH / 4u) + output_vec_index(b)] = 1.0 / state.norm
            * vec4(PART(acc[2u * b], 0) + PART(acc[2u * b], 1), PART(acc[2u * b], 2) + PART(acc[2u * b], 3),
                   PART(acc[2u * b + 1u], 0) + PART(acc[2u * b + 1u], 1),
                   PART(acc[2u * b + 1u], 2) + PART(acc[2u * b + 1u], 3));
    barrier();
    bool is_whole = num_splits() == 1u;
    uint vecs = is_whole ? out_vecs() : value_vecs(), rows = min(tile.rows - tile.first, uint(ROWS));
    for (uint n = gl_LocalInvocationIndex; n < rows * vecs; n += THREADS) {
        uint r = n / vecs, e = n % vecs, at = part_index(item, split, r);
        vec2 whole = vec2(LOWEST, 0.0);
        vec4 sum = vec4(0.0);
        for (uint s = 0u; s < SUBGROUPS; ++s) whole.x = max(whole.x, group_state[s * ROWS + r].x);
        for (uint s = 0u; s < SUBGROUPS; ++s) {
            float factor = exp(group_state[s * ROWS + r].x - whole.x);
            whole.y = fma(group_state[s * ROWS + r].y, factor, whole.y);
            if (e < value_vecs()) sum = fma(sums[(s * ROWS + r) * (WIDTH / 4u) + e], vec4(factor), sum);
        }
        if (is_whole) write_out(tile, tile.first + r, e, sum, whole);
        else parts[at + 1u + e] = sum;
        if (e == 0u && is_whole) write_lse(tile, tile.first + r, whole);
        else if (e == 0u) parts[at] = vec4(whole, 0.0, 0.0);
    }
}

void main() {
    uint items = num_row_tiles() * num_splits();
    for (uint index = gl_WorkGroupID.x; index < items; index += gl_NumWorkGroups.x) {
        uint item = index / num_splits(), split = index % num_splits();
        RowTile tile = row_tile(item);
        uint begin = tile_key_begin(tile) + split * keys_per_split();
        uint end = min(begin + keys_per_split(), tile_key_end(tile));
        State state = State(LOWEST, 0.0, 1.0, 0.0);
        SUMS acc[STEPS];
        UNROLL for (uint i = 0u; i < STEPS; ++i) acc[i] = no_sums();
        if (begin < end) {
            bool plain = prepare_scores(tile, begin, end);
            attend(tile, begin, end, plain, state, acc);
        }
        finish(tile, item, split, state, acc);
        if (num_splits() > 1u && is_last(item)) merge_parts(tile, item);
        barrier();
    }
}
