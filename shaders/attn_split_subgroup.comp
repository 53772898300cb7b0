// Purpose   decode and other short queries: the rows of one KV head share each K/V read, the keys are split over
//           workgroups, and the last workgroup of a head to finish merges the parts in the same dispatch
// Maths     s_j = score of key j;  m' = max(m, s_j);  l' = l e^(m-m') + sum_j e^(s_j-m')
//           acc' = acc e^(m-m') + sum_j e^(s_j-m') v_j;  out = acc / l;  lse = m + ln l
// Bindings  0 params  1 query [B, H, L, D]  2 key [B, Hkv, S, D] quads  3 value [B, Hkv, S, Ev] quads  4 mask
//           5 parts [item, split, ROWS, 1 + value vecs] vec4s  6 tickets [item], 0 before and after every run
//           7 out [B, H, L, Ev]  8 lse [B, H, L]  9 new_key, 10 new_value: new rows, read if FLAG_APPEND is set, and
//           written to the cache first. An item is ROWS rows of one (batch, KV head)
// Grid      any number of workgroups of THREADS; each takes one (item, split) after another. LANES invocations share a key
//           row, QUADS quads of 16 bytes each; a group of LANES takes IN_FLIGHT keys at a time, and all their bytes are
//           on the way before the first is used. The ROWS x IN_FLIGHT scores are summed so that each invocation is
//           left with ELEMENTS of them, weighs those, and hands the weights round
// Spec      THREADS: invocations of a workgroup, 128 or 256. USED_ROWS: rows of an item that there are, at most ROWS.
//           BATCH_SIZE, NUM_KV_HEADS, GROUP_SIZE, Q_LEN, HEAD_VECS, VALUE_VECS, OUT_VECS: as in the params block, or 0
// Push      params_base (words); query_base, key_base, value_base, out_base (vecs); mask_base, tickets_base, lse_base
//           (words); parts_base (vec4s); new_key_base, new_value_base (vecs)
// Bounds    only keys in the union of the rows' visible ranges are read. An empty split contributes nothing. With
//           FLAG_APPEND rows [input_pos(b), kv_len(b)) of the cache are written, those and no others
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
layout(constant_id = 1) const uint USED_ROWS = 8u;  // of ROWS: what is not used costs no register
layout(constant_id = 2) const uint BATCH_SIZE = 0u;  // these 0: what the params block says
layout(constant_id = 3) const uint NUM_KV_HEADS = 0u;
layout(constant_id = 4) const uint GROUP_SIZE = 0u;
layout(constant_id = 5) const uint Q_LEN = 0u;
layout(constant_id = 6) const uint HEAD_VECS = 0u;
layout(constant_id = 7) const uint VALUE_VECS = 0u;
layout(constant_id = 8) const uint OUT_VECS = 0u;
#define CONSTANT_SIZES
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
    uint new_key_base;
    uint new_value_base;
} push;

#include "key_quads.glsl"
#include "query_out.glsl"
#if defined(ROWS_R4)
#define ROWS 4
#elif defined(ROWS_R8)
#define ROWS 8
#endif
#if defined(LANES_L4)
#define LANES 4
#elif defined(LANES_L8)
#define LANES 8
#elif defined(LANES_L16)
#define LANES 16
#endif
#if defined(QUADS_Q1)
#define QUADS 1
#elif defined(QUADS_Q2)
#define QUADS 2
#elif defined(QUADS_Q4)
#define QUADS 4
#endif
#define VECS (QUADS * QUAD_VECS)
#define IN_FLIGHT 4
#define SCORES (ROWS * IN_FLIGHT)    // element r * IN_FLIGHT + u is the score of row r and key u
#define ELEMENTS (SCORES / LANES)    // of them in each invocation once they are summed; all of one row
#define SHARERS (IN_FLIGHT / ELEMENTS)  // neighbours that hold the same row
#define BLOCK_ROWS uint(ROWS)

#include "params.glsl"
layout(set = 0, binding = 1) restrict readonly buffer Query { QUERY query[]; };
layout(set = 0, binding = 2) readonly buffer Key { uvec4 key[]; };
layout(set = 0, binding = 2) coherent writeonly buffer KeyRows { KEY_ROWS key_rows[]; };
layout(set = 0, binding = 3) readonly buffer Value { uvec4 value[]; };
layout(set = 0, binding = 3) coherent writeonly buffer ValueRows { KEY_ROWS value_rows[]; };
layout(set = 0, binding = 4) restrict readonly buffer Mask { uint mask_data[]; };
layout(set = 0, binding = 5) coherent buffer Parts { vec4 parts[]; };
layout(set = 0, binding = 6) coherent buffer Tickets { uint tickets[]; };
layout(set = 0, binding = 7) coherent writeonly buffer Out { QUERY outputs[]; };
layout(set = 0, binding = 8) coherent writeonly buffer Lse { float lse[]; };
layout(set = 0, binding = 9) restrict readonly buffer NewKey { QUERY new_key[]; };
layout(set = 0, binding = 10) restrict readonly buffer NewValue { QUERY new_value[]; };
#include "tiles.glsl"
#include "score.glsl"

#define RUN (LANES * VECS)
#define ALL_SUMS (THREADS * VECS * (VECS <= 2 ? 2u : 1u))
shared vec4 sums[ALL_SUMS];  // acc of some rows, at least one: a RUN for each subgroup and row
#define WAY_SUMS sums
#define MERGE_SHUFFLED
#include "split.glsl"
#include "merge_shuffled.glsl"
shared vec2 group_state[THREADS / LANES * ROWS];  // (row_max, row_sum) of each subgroup and row

uint lane() { return gl_SubgroupInvocationID % LANES; }
uint lane_group() { return (gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID) / LANES; }
uint lane_groups() { return gl_NumSubgroups * gl_SubgroupSize / LANES; }

#include "append.glsl"

// The index, in vecs of the head, of vec i that this invocation holds.
uint vec_index(uint i) { return ((i / QUAD_VECS) * LANES + lane()) * QUAD_VECS + i % QUAD_VECS; }

// <a, b> + sum in four fused multiply-adds.
float dot_add(vec4 a, vec4 b, float sum) { return fma(a.x, b.x, fma(a.y, b.y, fma(a.z, b.z, fma(a.w, b.w, sum)))); }

// Give half of the elements to the invocation `step` lanes away and take its share of the other half.
#define EXCHANGE(step, kept)                                         \
    [[unroll]] for (uint i = 0u; i < (kept); ++i) {                  \
        bool upper = (lane() & (step)) != 0u;                        \
        float give = upper ? s[i] : s[i + (kept)];                   \
        float keep = upper ? s[i + (kept)] : s[i];                   \
        s[i] = keep + subgroupShuffleXor(give, step);                \
    }

// Sum every element over the LANES invocations of the group: each exchange leaves an invocation with half of the
// elements, so that in the end it holds the sums of elements lane() * ELEMENTS and the next.
void sum_over_lanes(inout float s[SCORES]) {
#if LANES == 16
    EXCHANGE(8u, SCORES / 2)
    EXCHANGE(4u, SCORES / 4)
    EXCHANGE(2u, SCORES / 8)
    EXCHANGE(1u, SCORES / 16)
#elif LANES == 8
    EXCHANGE(4u, SCORES / 2)
    EXCHANGE(2u, SCORES / 4)
    EXCHANGE(1u, SCORES / 8)
#else
    EXCHANGE(2u, SCORES / 2)
    EXCHANGE(1u, SCORES / 4)
#endif
}

// The state of one row between blocks of keys, in the invocations that hold the row's elements.
struct State {
    float row_max, row_sum;
};

// The quads of IN_FLIGHT rows that this invocation holds: its share of rows j, j + groups and so on; 0 beyond the end.
#define FETCH(held, rows, at, row, quads, j)                                                                   \
    [[unroll]] for (uint u = 0u; u < IN_FLIGHT; ++u)                                                           \
        [[unroll]] for (uint n = 0u; n < QUADS; ++n) {                                                         \
            uint quad = n * LANES + lane();                                                                    \
            held[u * QUADS + n] = uvec4(0u);                                                                   \
            if ((j) + u * groups < end && quad < (quads))                                                      \
                held[u * QUADS + n] = rows[at + ((j) + u * groups) * row + quad];                              \
        }

// Add values times weights to acc, where `has_weight`. One branch around it all: one for each row took 2 % longer.
#define ADD_VALUES(has_weight)                                                                          \
    [[unroll]] for (uint i = 0u; i < VECS; ++i) {                                                       \
        vec4 x[IN_FLIGHT];                                                                              \
        [[unroll]] for (uint u = 0u; u < IN_FLIGHT; ++u)                                                \
            x[u] = quad_vec(v[u * QUADS + i / QUAD_VECS], i % QUAD_VECS);                               \
        [[unroll]] for (uint r = 0u; r < ROWS; ++r)                                                     \
            [[unroll]] for (uint u = 0u; u < IN_FLIGHT; ++u)                                            \
                if (r < USED_ROWS && (has_weight))                                                      \
                    acc[r * VECS + i] = fma(vec4(weight[r * IN_FLIGHT + u]), x[u], acc[r * VECS + i]);  \
    }

void attend(RowTile tile, uint begin, uint end, inout State state, inout vec4 acc[ROWS * VECS]) {
    uint k_row = k_stride_row() / QUAD_VECS, k_quads = (head_vecs() + QUAD_VECS - 1u) / QUAD_VECS;
    uint v_row = v_stride_row() / QUAD_VECS, v_quads = (value_vecs() + QUAD_VECS - 1u) / QUAD_VECS;
    uint k_at = (push.key_base + key_offset() + tile.b * k_stride_batch() + tile.hk * k_stride_head()) / QUAD_VECS;
    uint v_at = (push.value_base + value_offset() + tile.b * v_stride_batch() + tile.hk * v_stride_head()) / QUAD_VECS;
    uint groups = lane_groups(), home = gl_SubgroupInvocationID - lane();
    uint j0 = begin + lane_group();
    vec4 q[ROWS * VECS];
    // Loads without a condition are half of the code, and what is beyond the end is read from before it.
    [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        uint row = min(tile.first + r, tile.rows - 1u);
        uint at = push.query_base + tile.b * q_stride_batch() + row_head(tile, row) * q_stride_head()
                  + row_token(row) * q_stride_row();
        [[unroll]] for (uint i = 0u; i < VECS; ++i) {
            q[r * VECS + i] = vec4(0.0);
            if (r >= USED_ROWS) continue;
            bool is_there = tile.first + r < tile.rows && vec_index(i) < head_vecs();
            vec4 x = query_vec(query[at + min(vec_index(i), head_vecs() - 1u)]);
            q[r * VECS + i] = mix(vec4(0.0), x, bvec4(is_there));
        }
    }
    ScoreRule rule = score_rule();
    uint first = lane() * ELEMENTS;  // this invocation's elements: row first / IN_FLIGHT, keys first % IN_FLIGHT on
    ScoreRow row = score_row(tile, tile.first + first / IN_FLIGHT);
    // What a row that does not exist makes of its scores does not matter, so it need not take the long way.
    bool plain = tile.first + first / IN_FLIGHT >= tile.rows || is_plain(rule, row, begin, end - 1u);
    // Every invocation of a subgroup goes round equally often: the last keys are predicated.
    uint rounds = (end - begin + groups * IN_FLIGHT - 1u) / (groups * IN_FLIGHT);
    for (uint round = 0u; round < rounds; ++round, j0 += groups * IN_FLIGHT) {
        uvec4 k[IN_FLIGHT * QUADS], v[IN_FLIGHT * QUADS];
        FETCH(k, key, k_at, k_row, k_quads, j0)
        FETCH(v, value, v_at, v_row, v_quads, j0)
        float s[SCORES];
        [[unroll]] for (uint i = 0u; i < SCORES; ++i) s[i] = 0.0;
        [[unroll]] for (uint i = 0u; i < VECS; ++i) {
            vec4 x[IN_FLIGHT];
            [[unroll]] for (uint u = 0u; u < IN_FLIGHT; ++u)
                x[u] = quad_vec(k[u * QUADS + i / QUAD_VECS], i % QUAD_VECS);
            [[unroll]] for (uint r = 0u; r < ROWS; ++r)  // rows that do not exist have queries of 0
                [[unroll]] for (uint u = 0u; u < IN_FLIGHT; ++u)
                    if (r < USED_ROWS) s[r * IN_FLIGHT + u] = dot_add(q[r * VECS + i], x[u], s[r * IN_FLIGHT + u]);
        }
        sum_over_lanes(s);

        float new_max = state.row_max;
        [[unroll]] for (uint i = 0u; i < ELEMENTS; ++i) {
            uint j = j0 + ((first + i) % IN_FLIGHT) * groups;
            float x = uintBitsToFloat(MINUS_INFINITY);
            if (j < end) x = plain ? s[i] * rule.scale : masked_score(s[i], rule, row, j);
            s[i] = x;
            new_max = max(new_max, x);
        }
        [[unroll]] for (uint step = 1u; step < SHARERS; step *= 2u)
            new_max = max(new_max, subgroupShuffleXor(new_max, step));
        float shrink = exp(state.row_max - new_max), sum = 0.0;
        float p[ELEMENTS];
        bool is_zero = false;  // a weight of 0 must not meet an infinity or a NaN; keys beyond the end were read as 0
        [[unroll]] for (uint i = 0u; i < ELEMENTS; ++i) {
            p[i] = floatBitsToUint(s[i]) == MINUS_INFINITY ? 0.0 : exp(s[i] - new_max);
            sum += p[i];
            is_zero = is_zero || (p[i] == 0.0 && j0 + ((first + i) % IN_FLIGHT) * groups < end);
        }
        is_zero = is_zero && tile.first + first / IN_FLIGHT < tile.rows;
        [[unroll]] for (uint step = 1u; step < SHARERS; step *= 2u) sum += subgroupShuffleXor(sum, step);
        state.row_sum = state.row_sum * shrink + sum;
        state.row_max = new_max;

        bool careful = subgroupAny(is_zero);
        if (subgroupAny(shrink != 1.0)) {
            [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
                if (r >= USED_ROWS) continue;
                float factor = subgroupShuffle(shrink, home + r * IN_FLIGHT / ELEMENTS);
                [[unroll]] for (uint i = 0u; i < VECS; ++i) acc[r * VECS + i] *= factor;
            }
        }
        float weight[SCORES];
        [[unroll]] for (uint i = 0u; i < SCORES; ++i)
            if (i / IN_FLIGHT < USED_ROWS) weight[i] = subgroupShuffle(p[i % ELEMENTS], home + i / ELEMENTS);
        if (!careful) {
            ADD_VALUES(true)
        } else {
            ADD_VALUES(weight[r * IN_FLIGHT + u] != 0.0)
        }
    }
}

// Put the states of every subgroup's lane groups, and of every row, into group_state.
void merge_states(State state) {
    for (uint step = LANES; step < gl_SubgroupSize; step *= 2u) {
        vec2 other = vec2(subgroupShuffleXor(state.row_max, step), subgroupShuffleXor(state.row_sum, step));
        vec2 both = merged(vec2(state.row_max, state.row_sum), other);
        state = State(both.x, both.y);
    }
    uint r = lane() * ELEMENTS / IN_FLIGHT;
    if (gl_SubgroupInvocationID < LANES) group_state[gl_SubgroupID * ROWS + r] = vec2(state.row_max, state.row_sum);
}

float own_max(State state, uint r) {
    return subgroupShuffle(state.row_max, gl_SubgroupInvocationID - lane() + r * IN_FLIGHT / ELEMENTS);
}
vec4 acc_factor(uint i) { return vec4(1.0); }
#include "finish_rows.glsl"

void main() {
    uint items = num_row_tiles() * num_splits();
    for (uint index = gl_WorkGroupID.x; index < items; index += gl_NumWorkGroups.x) {
        uint item = index / num_splits(), split = index % num_splits();
        RowTile tile = row_tile(item);
        uint begin = tile_key_begin(tile) + split * keys_per_split();
        uint end = min(begin + keys_per_split(), tile_key_end(tile));
        State state = State(LOWEST, 0.0);
        vec4 acc[ROWS * VECS];
        [[unroll]] for (uint i = 0u; i < ROWS * VECS; ++i) acc[i] = vec4(0.0);
        if ((flags() & FLAG_APPEND) != 0u) append_rows(tile, begin, end, split + 1u == num_splits());
        if (begin < end) attend(tile, begin, end, state, acc);
        merge_states(state);
        barrier();
        finish_rows(tile, item, split, state, acc);
        if (num_splits() > 1u && is_last(item)) merge_parts(tile, item);
        barrier();
    }
}
