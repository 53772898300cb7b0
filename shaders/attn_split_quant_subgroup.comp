// Purpose   decode and other short queries over quantised keys and values: as attn_split_subgroup, with codes that are
//           unpacked in registers
// Maths     as attn_split_subgroup; int8: <q, k_j> = scale_j sum_d q_d (code_jd - zero_point_j); blocks: each
//           invocation multiplies its share of the sum by the block's scale. A value's scale goes into its weight
// Bindings  as attn_split_subgroup; 2 key and 3 value hold the codes of all rows of a layer, then their scales
//           (vkattn/formats.py); queries and outputs of any float dtype
// Grid      any number of workgroups of THREADS; each takes one (item, split) after another. LANES invocations share a
//           key row, 16 elements each; a group of LANES takes IN_FLIGHT keys at a time. While keys are multiplied the
//           values are on the way, and the other way round. The scores are summed so that SHARERS neighbours are left
//           with those of one key, weigh it for all rows, and hand the weights round
// Spec      THREADS: invocations of a workgroup, 128 or 256. USED_ROWS: rows of an item that there are, at most ROWS
// Push      params_base (words); query_base, out_base (vecs); key_base, value_base (quads); mask_base, tickets_base,
//           lse_base (words); parts_base (vec4s)
// Bounds    only keys in the union of the rows' visible ranges are read, and scales of those. An empty split
//           contributes nothing
// Requires  subgroup shuffles and votes, and subgroups of at least LANES invocations
// Source    Flash-Decoding (Dao et al. 2023); Milakov and Gimelshein 2018
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_KHR_shader_subgroup_vote : require

layout(local_size_x = 128, local_size_x_id = 0) in;
layout(constant_id = 0) const uint THREADS = 128u;
layout(constant_id = 1) const uint USED_ROWS = 4u;  // of ROWS: what is not used costs no register
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
#ifndef UNIT_VECS
#define UNIT_VECS 4
#endif
#include "query_out.glsl"
#if defined(LANES_L4)
#define LANES 4
#elif defined(LANES_L8)
#define LANES 8
#elif defined(LANES_L16)
#define LANES 16
#endif
#define ROWS 4
#define VECS UNIT_VECS
#ifndef IN_FLIGHT
#if defined(KEY_Q4_0) && LANES >= 8
#define IN_FLIGHT 8  // half the bytes of the other formats: twice the keys
#else
#define IN_FLIGHT 4
#endif
#endif
#define SHARERS (LANES / IN_FLIGHT)  // neighbours that weigh the same key
#define BLOCK_ROWS uint(ROWS)
#define RUN (LANES * VECS)

#include "params.glsl"
#include "code_units.glsl"
layout(set = 0, binding = 1) restrict readonly buffer Query { QUERY query[]; };
layout(set = 0, binding = 2) restrict readonly buffer Key { UNIT key[]; };
layout(set = 0, binding = 2) restrict readonly buffer KeyScales { uint key_scales[]; };
layout(set = 0, binding = 3) restrict readonly buffer Value { UNIT value[]; };
layout(set = 0, binding = 3) restrict readonly buffer ValueScales { uint value_scales[]; };
layout(set = 0, binding = 4) restrict readonly buffer Mask { uint mask_data[]; };
layout(set = 0, binding = 5) coherent buffer Parts { vec4 parts[]; };
layout(set = 0, binding = 6) coherent buffer Tickets { uint tickets[]; };
layout(set = 0, binding = 7) coherent writeonly buffer Out { QUERY outputs[]; };
layout(set = 0, binding = 8) coherent writeonly buffer Lse { float lse[]; };
#include "read_query.glsl"
#include "tiles.glsl"
#include "score.glsl"

#define ALL_SUMS (THREADS * VECS)
shared vec4 sums[ALL_SUMS];  // acc of some rows, at least one: a RUN for each subgroup and row
#define WAY_SUMS sums
#define MERGE_SHUFFLED
#include "split.glsl"
#include "merge_shuffled.glsl"
shared vec2 group_state[THREADS / LANES * ROWS];  // (row_max, row_sum) of each subgroup and row

uint lane() { return gl_SubgroupInvocationID % LANES; }
uint lane_group() { return (gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID) / LANES; }
uint lane_groups() { return gl_NumSubgroups * gl_SubgroupSize / LANES; }

// <a, b> + sum in four fused multiply-adds.
float dot_add(vec4 a, vec4 b, float sum) { return fma(a.x, b.x, fma(a.y, b.y, fma(a.z, b.z, fma(a.w, b.w, sum)))); }

#include "code_rows.glsl"

// Sum the scores of all keys and rows over the LANES invocations of the group: while there are several keys an exchange
// leaves an invocation with half of them. Afterwards s[0 .. ROWS) are those of own_key().
#define EXCHANGE(step, kept)                                                         \
    [[unroll]] for (uint u = 0u; u < (kept); ++u)                                    \
        [[unroll]] for (uint r = 0u; r < ROWS; ++r) {                                \
            if (r >= USED_ROWS) continue;                                            \
            bool upper = (lane() & (step)) != 0u;                                    \
            float give = upper ? s[u * ROWS + r] : s[(u + (kept)) * ROWS + r];       \
            float keep = upper ? s[(u + (kept)) * ROWS + r] : s[u * ROWS + r];       \
            s[u * ROWS + r] = keep + subgroupShuffleXor(give, step);                 \
        }

void sum_over_lanes(inout float s[IN_FLIGHT * ROWS]) {
#if IN_FLIGHT == 8
    EXCHANGE(LANES / 2u, 4u)
    EXCHANGE(LANES / 4u, 2u)
    EXCHANGE(LANES / 8u, 1u)
#else
    EXCHANGE(LANES / 2u, 2u)
    EXCHANGE(LANES / 4u, 1u)
#endif
    for (uint step = SHARERS / 2u; step > 0u; step /= 2u)
        [[unroll]] for (uint r = 0u; r < ROWS; ++r)
            if (r < USED_ROWS) s[r] += subgroupShuffleXor(s[r], step);
}

// Each row's maximum, the same in the whole subgroup, and the sum of the weights of the keys that this invocation owns.
struct State {
    float row_max[ROWS], row_sum[ROWS];
};

// Let the maxima take in new scores (rare, once there have been a few): all sums shrink.
void raise_maxima(float s[IN_FLIGHT * ROWS], inout State state, inout vec4 acc[ROWS * VECS]) {
    [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        if (r >= USED_ROWS) continue;
        float new_max = max(state.row_max[r], s[r]);
        for (uint step = 1u; step < gl_SubgroupSize; step *= 2u)
            new_max = max(new_max, subgroupShuffleXor(new_max, step));
        float shrink = exp(state.row_max[r] - new_max);
        state.row_max[r] = new_max;
        state.row_sum[r] *= shrink;
        [[unroll]] for (uint i = 0u; i < VECS; ++i) acc[r * VECS + i] *= shrink;
    }
}

void attend(RowTile tile, uint begin, uint end, inout State state, inout vec4 acc[ROWS * VECS]) {
    vec4 q[ROWS * VECS];
    ScoreRule rule = score_rule();
    bool plain = true;
    [[dont_unroll]] for (uint r = 0u; r < min(USED_ROWS, tile.rows - tile.first); ++r)
        plain = plain && is_plain(rule, score_row(tile, tile.first + r), begin, end - 1u);
    // Queries go through shared memory: their dtype is known at run time only, and each load is a lot of code.
    for (uint n = gl_LocalInvocationIndex; n < USED_ROWS * uint(RUN); n += THREADS) {
        uint row = tile.first + n / uint(RUN), d = n % uint(RUN);
        vec4 x = vec4(0.0);  // rows that do not exist have queries of 0
        if (row < tile.rows && d < head_vecs())
            x = read_query(push.query_base + tile.b * q_stride_batch() + row_head(tile, row) * q_stride_head()
                           + row_token(row) * q_stride_row() + d);
        sums[n] = x;
    }
    barrier();
    [[unroll]] for (uint r = 0u; r < ROWS; ++r)
        [[unroll]] for (uint i = 0u; i < VECS; ++i)
            q[r * VECS + i] = r < USED_ROWS ? unit_factor(i) * sums[r * RUN + lane() * VECS + i] : vec4(0.0);
    barrier();
    Source k_source = source_of(push.key_base + key_offset(), tile.b * k_stride_batch() + tile.hk * k_stride_head(),
                                k_stride_batch(), k_stride_row(), head_vecs());
    Source v_source = source_of(push.value_base + value_offset(),
                                tile.b * v_stride_batch() + tile.hk * v_stride_head(), v_stride_batch(),
                                v_stride_row(), value_vecs());
    uint groups = lane_groups(), home = gl_SubgroupInvocationID - lane();

    // Every invocation of a subgroup goes round equally often. A group's keys are neighbours, so that what a subgroup
    // reads is one piece.
    uint two_23 = two_23_bits();
    uint rounds = (end - begin + groups * IN_FLIGHT - 1u) / (groups * IN_FLIGHT);
    uint j0 = begin + lane_group() * IN_FLIGHT;
    Codes k = load_keys(k_source, j0, end), v = load_values(v_source, j0, end);
    for (uint round = 0u; round < rounds; ++round, j0 += groups * IN_FLIGHT) {
        uint next = j0 + groups * IN_FLIGHT;
        float s[IN_FLIGHT * ROWS];
        [[unroll]] for (uint u = 0u; u < IN_FLIGHT; ++u) {
#if defined(KEY_INT8)
            float bias = BIAS + subgroupShuffle(float(int(k.scales[1])), home + u * SHARERS);
#else
            float bias = BIAS, block = block_scale(k.scales[u]);
#endif
            [[unroll]] for (uint r = 0u; r < ROWS; ++r) s[u * ROWS + r] = 0.0;
            [[unroll]] for (uint i = 0u; i < VECS; ++i) {
                vec4 x = unit_vec(k.unit[u], i, bias, two_23);
                [[unroll]] for (uint r = 0u; r < ROWS; ++r)
                    if (r < USED_ROWS) s[u * ROWS + r] = dot_add(q[r * VECS + i], x, s[u * ROWS + r]);
            }
#if !defined(KEY_INT8)
            [[unroll]] for (uint r = 0u; r < ROWS; ++r) s[u * ROWS + r] *= block;
#endif
        }
        sum_over_lanes(s);

        uint j = j0 + own_key();
        bool rises = false;
        [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
            if (r >= USED_ROWS) continue;
            float x = uintBitsToFloat(MINUS_INFINITY);
#if defined(KEY_INT8)
            s[r] *= uintBitsToFloat(k.scales[0]);
#endif
            if (j < end)
                x = plain ? s[r] * rule.scale : masked_score(s[r], rule, score_row(tile, tile.first + r), j);
            s[r] = x;
            rises = rises || x > state.row_max[r];
        }
        if (subgroupAny(rises)) raise_maxima(s, state, acc);
        k = load_keys(k_source, next, end);
        [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
            if (r >= USED_ROWS) continue;
            float p = floatBitsToUint(s[r]) == MINUS_INFINITY ? 0.0 : exp(s[r] - state.row_max[r]);
            state.row_sum[r] += p;
#if defined(KEY_INT8)
            s[r] = p == 0.0 ? 0.0 : p * uintBitsToFloat(v.scales[0]);  // a weight of 0 must not meet a NaN
#else
            s[r] = p;
#endif
        }
#if !defined(KEY_INT8)
        float blocks = 0.0;  // not finite if one of them is not (rare): a weight of 0 must not meet it
        [[unroll]] for (uint u = 0u; u < IN_FLIGHT; ++u) blocks += block_scale(v.scales[u]);
        bool careful = subgroupAny((floatBitsToUint(blocks) & 0x7F800000u) == 0x7F800000u);
#endif

        [[unroll]] for (uint u = 0u; u < IN_FLIGHT; ++u) {
            float weight[ROWS];
            [[unroll]] for (uint r = 0u; r < ROWS; ++r)
                if (r < USED_ROWS) weight[r] = subgroupShuffle(s[r], home + u * SHARERS);
#if defined(KEY_INT8)
            float bias = BIAS + subgroupShuffle(float(int(v.scales[1])), home + u * SHARERS);
#else
            float bias = BIAS, block = block_scale(v.scales[u]);
            if (!careful) {
                [[unroll]] for (uint r = 0u; r < ROWS; ++r) weight[r] *= block;
            } else {
                [[unroll]] for (uint r = 0u; r < ROWS; ++r) weight[r] = weight[r] == 0.0 ? 0.0 : weight[r] * block;
            }
#endif
            [[unroll]] for (uint i = 0u; i < VECS; ++i) {
                vec4 x = unit_vec(v.unit[u], i, bias, two_23);
                [[unroll]] for (uint r = 0u; r < ROWS; ++r)
                    if (r < USED_ROWS) acc[r * VECS + i] = fma(vec4(weight[r]), x, acc[r * VECS + i]);
            }
        }
        v = load_values(v_source, next, end);
    }
}

// Put the states of every subgroup, and of every row, into group_state.
void merge_states(State state) {
    [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        if (r >= USED_ROWS) continue;
        float sum = lane() % SHARERS == 0u ? state.row_sum[r] : 0.0;  // neighbours have weighed the same keys
        for (uint step = 1u; step < gl_SubgroupSize; step *= 2u) sum += subgroupShuffleXor(sum, step);
        if (gl_SubgroupInvocationID == 0u) group_state[gl_SubgroupID * ROWS + r] = vec2(state.row_max[r], sum);
    }
}

// acc is relative to the row_max of its subgroup.
float own_max(State state, uint r) {
    float row_max = LOWEST;
    [[unroll]] for (uint k = 0u; k < ROWS; ++k)
        if (k < USED_ROWS && k == r) row_max = state.row_max[k];
    return row_max;
}
uint vec_index(uint i) { return lane() * VECS + i; }
vec4 acc_factor(uint i) { return unit_factor(i); }
#include "finish_rows.glsl"

void main() {
    uint items = num_row_tiles() * num_splits();
    for (uint index = gl_WorkGroupID.x; index < items; index += gl_NumWorkGroups.x) {
        uint item = index / num_splits(), split = index % num_splits();
        RowTile tile = row_tile(item);
        uint begin = tile_key_begin(tile) + split * keys_per_split();
        uint end = min(begin + keys_per_split(), tile_key_end(tile));
        State state;
        [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
            state.row_max[r] = LOWEST;
            state.row_sum[r] = 0.0;
        }
        vec4 acc[ROWS * VECS];
        [[unroll]] for (uint i = 0u; i < ROWS * VECS; ++i) acc[i] = vec4(0.0);
        if (begin < end) attend(tile, begin, end, state, acc);
        merge_states(state);
        barrier();
        finish_rows(tile, item, split, state, acc);
        if (num_splits() > 1u && is_last(item)) merge_parts(tile, item);
        barrier();
    }
}
