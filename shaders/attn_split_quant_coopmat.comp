// Purpose   decode and other short queries over quantised keys and values, multiplied on matrix units
// Maths     as attn_split_quant_subgroup. Codes are exact in half precision. A query, and a weight (with a value's scale
//           in it), is two halves, the leading 11 bits and what they leave: each row takes two columns of a matrix, and
//           sums are float32. Before that, queries and weights are multiplied by powers of two that suit a half
// Bindings  as attn_split_quant_subgroup
// Grid      any number of workgroups of THREADS; each takes one (item, split) after another. A subgroup takes tiles of 16
//           keys on its own: keys by queries, weights, values by weights, with the next ones on the way. Invocation
//           4 g + t has the scores of keys g and g + 8, the state and the sums of row t
// Spec      THREADS: invocations of a workgroup
// Push      params_base (words); query_base, out_base (vecs); key_base, value_base (quads); mask_base, tickets_base,
//           lse_base (words); parts_base (vec4s)
// Bounds    only keys in the union of the rows' visible ranges are read, and scales of those. An empty split contributes
//           nothing. Codes are finite whatever they are, and a scale of a key without weight is left out
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
layout(constant_id = 1) const uint FULL_ROWS = 0u;  // whether head_dim and value_dim need all quads of WIDTH
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
// Keys and values as their invocations take them: units, their bytes, and how many of a row are an invocation's.
#if defined(KEY_INT8)
#define KEY_UNIT uvec4
#define KEY_UNIT_BYTES 16u
#define KEY_UNITS (WIDTH / 64)
#if WIDTH == 64
#define VALUE_UNIT uvec2
#define VALUE_UNIT_BYTES 8u
#else
#define VALUE_UNIT uvec4
#define VALUE_UNIT_BYTES 16u
#endif
#define VALUE_UNITS 1
#else
#if defined(KEY_Q8_0)
#define KEY_UNIT uvec2
#define KEY_UNIT_BYTES 8u
#else
#define KEY_UNIT uint
#define KEY_UNIT_BYTES 4u
#endif
#define KEY_UNITS (WIDTH / 32)
#define VALUE_UNIT uint
#define VALUE_UNIT_BYTES 4u
#define VALUE_UNITS (WIDTH / 32)
#endif

#include "params.glsl"
layout(set = 0, binding = 1) restrict readonly buffer Query { QUERY query[]; };
layout(set = 0, binding = 2) restrict readonly buffer Key { KEY_UNIT key[]; };
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
shared vec2 group_state[THREADS / 32u * ROWS];  // (row_max, row_sum) of each subgroup and row
shared ScoreRule rule;                          // these two not in registers, of which there are few
shared ScoreRow score_rows[ROWS];

// One row's state in its invocations; row_sum is that of an invocation's own keys. Weights and sums of values are
// multiplied by norm, a power of two, so that no weight is beyond LIMIT, where halves end, and few are small ones.
struct State {
    float row_max, row_sum, norm;
};
const float LIMIT = 32768.0;
const int MOST_NORM = 100;  // norm is within 2^-100 .. 2^100

// x is at least 2^e and less than 2^(e + 1).
int exponent_of(float x) { return int(floatBitsToUint(x) >> 23) - 127; }
float power_of_2(int e) { return e < -126 ? 0.0 : uintBitsToFloat(uint(min(e, 127) + 127) << 23); }

// Of numbers for column g: their leading bits where it is even, else what these leave.
HALF2 own_part(vec2 x) {
    vec2 high = leading(x), rest = mix(x - high, vec2(0.0), isinf(high));
    return rounded(g() % 2u == 0u ? high : rest);
}

// Row g / 2 of the queries as columns g; returns what undoes the power of two in row t.
float load_queries(RowTile tile, out RIGHT q[STEPS]) {
    uint row = tile.first + g() / 2u;
    uint at = push.query_base + tile.b * q_stride_batch() + row_head(tile, row) * q_stride_head()
        + row_token(row) * q_stride_row();
    vec4 x[STEPS];
    float largest = 0.0;
    UNROLL for (uint i = 0u; i < STEPS; ++i) {
        uint d = query_vec_index(i);
        x[i] = vec4(0.0);
        if (row < tile.rows && d < head_vecs()) x[i] = read_query(at + d);
        vec4 size = abs(x[i]);
        largest = max(largest, max(max(size.x, size.y), max(size.z, size.w)));
    }
    largest = max(largest, shuffle_float(largest, LANE ^ 1u));
    largest = max(largest, shuffle_float(largest, LANE ^ 2u));
    float factor = power_of_2(clamp(13 - exponent_of(largest), -120, 120));  // the largest becomes [2^13, 2^14)
    UNROLL for (uint i = 0u; i < STEPS; ++i) {
        vec4 y = factor * x[i];
        PUT(q[i], 0, own_part(y.xz))
        PUT(q[i], 2, own_part(y.yw))
    }
    return shuffle_float(1.0 / factor, 8u * t());
}

// The products of keys g and g + 8 with row t.
vec2 multiply_keys(Keys k, RIGHT q[STEPS], uint blocks, Decoder d) {
#if defined(KEY_INT8)
    SUMS even = no_sums(), odd = no_sums();  // two chains: each product waits for the one before
    UNROLL for (uint i = 0u; i < STEPS; i += 2u) {
        even = multiply_add(key_operand(k, i, d), q[i], even);
        odd = multiply_add(key_operand(k, i + 1u, d), q[i + 1u], odd);
    }
    return uintBitsToFloat(uvec2(k.scale[0].x, k.scale[1].x))
        * vec2((PART(even, 0) + PART(even, 1)) + (PART(odd, 0) + PART(odd, 1)),
               (PART(even, 2) + PART(even, 3)) + (PART(odd, 2) + PART(odd, 3)));
#else
    vec2 s = vec2(0.0);
    UNROLL for (uint b = 0u; b < BLOCKS; ++b) {
        if (b >= blocks) continue;  // what pads a scale may be anything
        SUMS dots = multiply_add(key_operand(k, 2u * b, d), q[2u * b], no_sums());
        dots = multiply_add(key_operand(k, 2u * b + 1u, d), q[2u * b + 1u], dots);
        s = fma(vec2(PART(dots, 0) + PART(dots, 1), PART(dots, 2) + PART(dots, 3)), block_scales(k.scale, b), s);
    }
    return s;
#endif
}

// Multiplies all sums of the invocation, which are of row t.
void shrink_sums(float factor, inout SUMS acc[STEPS]) {
    UNROLL for (uint i = 0u; i < STEPS; ++i)
        UNROLL for (uint c = 0u; c < 4u; ++c) PART(acc[i], c) *= factor;
}

// Lets the maximum of row t take in new scores (rare, once there have been a few): its sums shrink.
void raise_maximum(vec2 s, inout State state, inout SUMS acc[STEPS]) {
    float new_max = max_over_g(max(state.row_max, max(s.x, s.y))), shrink = exp(state.row_max - new_max);
    state.row_max = new_max;
    state.row_sum *= shrink;
    shrink_sums(shrink, acc);
}

// Weights of row t and keys g and g + 8: relative to the maximum, and then with the scales of values in them, of one
// block after another; returns the largest of these.
vec2 probabilities(vec2 s, float row_max) {
    return vec2(floatBitsToUint(s.x) == MINUS_INFINITY ? 0.0 : exp(s.x - row_max),
                floatBitsToUint(s.y) == MINUS_INFINITY ? 0.0 : exp(s.y - row_max));
}
float scale_weights(vec2 p, float norm, uvec2 scale[2], uint blocks, out vec2 weight[WEIGHTS]) {
    float largest = 0.0;
    UNROLL for (uint h = 0u; h < 2u; ++h)
        if (p[h] == 0.0) scale[h] = uvec2(0u);  // a weight of 0 must not meet a NaN
    UNROLL for (uint b = 0u; b < WEIGHTS; ++b) {
        weight[b] = norm * p * value_scales_of(scale, b);
        if (b < blocks) largest = max(largest, max(abs(weight[b].x), abs(weight[b].y)));
    }
    return largest;
}

// Chooses norm anew (rare), from the largest weight before it is multiplied: that becomes [2^11, 2^12), unless sums would
// become larger than 2^60.
void choose_norm(float largest, inout State state, inout SUMS acc[STEPS]) {
    float most = 0.0;
    UNROLL for (uint i = 0u; i < STEPS; ++i)
        UNROLL for (uint c = 0u; c < 4u; ++c) most = max(most, abs(PART(acc[i], c)));
    int wanted = clamp(11 - exponent_of(max_over_g(largest)), -MOST_NORM, MOST_NORM);
    int step = min(wanted - exponent_of(state.norm), 60 - exponent_of(max_over_g(most)));
    float factor = power_of_2(step);
    state.norm *= factor;
    shrink_sums(factor, acc);
}

// Weights of row t and keys g and g + 8 as an operand for all: column 2 r has their leading bits in row r, column 2 r + 1
// the rest. Each invocation needs words of two others: even columns from an even g first, odd ones from an odd g.
RIGHT weight_operand(vec2 weight) {
    vec2 high = leading(weight);
    uint high_bits = half_bits_of(rounded(high)), rest_bits = half_bits_of(rounded(weight - high));
    bool is_even = g() % 2u == 0u;
    uint from = 8u * t() + g() / 2u;
    uint near = shuffle(is_even ? high_bits : rest_bits, is_even ? from : from + 4u);
    uint far = shuffle(is_even ? rest_bits : high_bits, is_even ? from + 4u : from);
    RIGHT weights;
    PUT(weights, 0, halves(is_even ? near : far))
    PUT(weights, 2, halves(is_even ? far : near))
    return weights;
}

// Adds the values, weighted, to the sums.
void add_values(Values v, vec2 weight[WEIGHTS], Decoder d, inout SUMS acc[STEPS]) {
    HALF2 bias[2] = HALF2[2](HALF2(1152.0), HALF2(1152.0));
    RIGHT weights;
#if defined(KEY_INT8)
    uint bias_pair = bias_bits(v.scale[0].y) | bias_bits(v.scale[1].y) << 16;
    UNROLL for (uint i = 0u; i < 2u; ++i) bias[i] = halves(shuffle(bias_pair, 8u * t() + 4u * i));
#endif
    UNROLL for (uint b = 0u; b < BLOCKS; ++b) {
        if (b < WEIGHTS) weights = weight_operand(weight[b]);
        LEFT first, second;
        value_operands(v, b, bias, d, first, second);
        acc[2u * b] = multiply_add(first, weights, acc[2u * b]);
        acc[2u * b + 1u] = multiply_add(second, weights, acc[2u * b + 1u]);
    }
}

// Goes through the keys [begin, end) of the item; `plain` if nothing but the scale applies to their scores.
void attend(RowTile tile, uint begin, uint end, bool plain, inout State state, inout SUMS acc[STEPS]) {
    RIGHT q[STEPS];
    float norm = load_queries(tile, q), score_scale = scale();
    Source k_source = source_of(push.key_base + key_offset(), tile.b * k_stride_batch() + tile.hk * k_stride_head(),
                                k_stride_batch(), k_stride_row(), head_vecs());
    Source v_source = source_of(push.value_base + value_offset(),
                                tile.b * v_stride_batch() + tile.hk * v_stride_head(), v_stride_batch(),
                                v_stride_row(), value_vecs());
    Decoder d = decoder();
    bool is_short = end - begin < TILE_KEYS;
    uint step = SUBGROUPS * TILE_KEYS, j0 = begin + SUBGROUP * TILE_KEYS;
    Keys k = fetch_keys(k_source, j0, end, is_short);
    Values v = fetch_values(v_source, j0, end, is_short);
    for (; j0 < end; j0 += step) {
        vec2 s = norm * multiply_keys(k, q, k_source.blocks, d), p;
        k = fetch_keys(k_source, j0 + step, end, is_short);
        UNROLL for (uint h = 0u; h < 2u; ++h) {
            uint j = first_key(j0, end, is_short) + 8u * h + g();
            float x = uintBitsToFloat(MINUS_INFINITY);
            if (j >= j0 && j < end) x = plain ? s[h] * score_scale : masked_score(s[h], rule, score_rows[t()], j);
            s[h] = x;
        }
        p = probabilities(s, state.row_max);
        vec2 weight[WEIGHTS];
        float largest = scale_weights(p, state.norm, v.scale, v_source.blocks, weight);
        if (any_of(max(s.x, s.y) > state.row_max || largest > LIMIT)) {
            raise_maximum(s, state, acc);
            p = probabilities(s, state.row_max);
            choose_norm(scale_weights(p, 1.0, v.scale, v_source.blocks, weight), state, acc);
            UNROLL for (uint b = 0u; b < WEIGHTS; ++b) weight[b] *= state.norm;
        }
        state.row_sum += p.x + p.y;
        add_values(v, weight, d, acc);
        v = fetch_values(v_source, j0 + step, end, is_short);
    }
}

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
    UNROLL for (uint b = 0u; b < BLOCKS; ++b)
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
        State state = State(LOWEST, 0.0, power_of_2(MOST_NORM));
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
