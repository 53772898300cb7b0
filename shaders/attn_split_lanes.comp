// Purpose   decode and other short queries on devices that load for each invocation in turn (software Vulkan): each
//           element of a key or value is loaded once for all rows, in the order of memory, and little else is
// Maths     s_j = score of key j;  m' = max(m, s_j);  l' = l e^(m-m') + sum_j e^(s_j-m')
//           acc' = acc e^(m-m') + sum_j e^(s_j-m') v_j;  out = acc / l;  lse = m + ln l
// Bindings  as attn_split; an item is ROWS rows of one (batch, KV head)
// Grid      any number of workgroups of LANES; each takes one (item, split) after another. A row of keys or values lies
//           across the lanes: lane l holds vecs l, l + LANES, ... of it, and of queries and sums. A block is GROUPS
//           times LANES keys; a key's score is summed over the lanes and kept by lane key % LANES, its weight handed
//           round
// Spec      USED_ROWS: rows of an item that there are, at most ROWS. KEY_CHUNKS, VALUE_CHUNKS: vecs of a key and of a
//           row of output that a lane holds
// Push      as attn_split
// Bounds    head_dim and value_dim to 128. Only keys in the union of the rows' visible ranges are read
// Requires  subgroup shuffles; subgroups of LANES invocations or more
// Source    Flash-Decoding (Dao et al. 2023); Milakov and Gimelshein 2018
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require

layout(local_size_x = 8) in;
layout(constant_id = 0) const uint USED_ROWS = 4u;
layout(constant_id = 1) const uint KEY_CHUNKS = 4u;
layout(constant_id = 2) const uint VALUE_CHUNKS = 4u;
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

#include "query_out.glsl"
#include "key_format.glsl"
#define ROWS 4
#define LANES 8
#define CHUNKS 4  // at most
#define BLOCK_ROWS uint(ROWS)
#define FLYING 1u

#include "params.glsl"
layout(set = 0, binding = 1) restrict readonly buffer Query { QUERY query[]; };
layout(set = 0, binding = 2) restrict readonly buffer Key { KEY key[]; };
layout(set = 0, binding = 3) restrict readonly buffer Value { KEY value[]; };
layout(set = 0, binding = 4) restrict readonly buffer Mask { uint mask_data[]; };
layout(set = 0, binding = 5) coherent buffer Parts { vec4 parts[]; };
layout(set = 0, binding = 6) coherent buffer Tickets { uint tickets[]; };
layout(set = 0, binding = 7) coherent writeonly buffer Out { QUERY outputs[]; };
layout(set = 0, binding = 8) coherent writeonly buffer Lse { float lse[]; };
#include "read_query.glsl"
#include "key_rows.glsl"
#include "value_rows.glsl"
#include "tiles.glsl"
#include "score.glsl"
#include "split.glsl"

const uint GROUPS = 4u, BLOCK = GROUPS * LANES;

uint lane() { return gl_SubgroupInvocationID; }

// Such a device runs both sides of an `if`, but a loop only as often as it must: what is rare goes into a loop.
uint only_if(bool wanted, uint times) { return wanted ? times : 0u; }

// What belongs to the rows of an item. Rows that do not exist are the last one again, and are not written.
struct Rows {
    ScoreRow at[ROWS];
    float row_max[ROWS], row_sum[ROWS];  // row_sum: of this lane's keys
};

float sum_over_lanes(float x) {
    x += subgroupShuffleXor(x, 1u);
    x += subgroupShuffleXor(x, 2u);
    return x + subgroupShuffleXor(x, 4u);
}
float max_over_lanes(float x) {
    x = max(x, subgroupShuffleXor(x, 1u));
    x = max(x, subgroupShuffleXor(x, 2u));
    return max(x, subgroupShuffleXor(x, 4u));
}

// The index of this lane's vec c of a row; where a row is shorter, its last vec again.
uint vec_index(uint c, uint vecs) { return min(c * LANES + lane(), vecs - 1u); }

// The dot products of the block's keys: element r * GROUPS + g is that of row r and key j0 + g * LANES + lane().
void dot_products(vec4 q[ROWS * CHUNKS], uint key_at, uint j0, uint end, inout float s[ROWS * GROUPS]) {
    uint step = key_step(), vecs = head_vecs();
    for (uint g = 0u; g < min(GROUPS, (end - j0 + LANES - 1u) / LANES); ++g) {
        float own[ROWS];
        [[unroll]] for (uint r = 0u; r < ROWS; ++r) own[r] = 0.0;
        [[dont_unroll]] for (uint l = 0u; l < LANES; ++l) {
            uint at = key_at + min(j0 + g * LANES + l, end - 1u) * step;
            vec4 k[CHUNKS];
            [[unroll]] for (uint c = 0u; c < CHUNKS; ++c)
                if (c < KEY_CHUNKS) k[c] = read_key(at, vec_index(c, vecs));
            [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
                if (r >= USED_ROWS) continue;
                float sum = 0.0;
                [[unroll]] for (uint c = 0u; c < CHUNKS; ++c)
                    if (c < KEY_CHUNKS) sum += c * LANES + lane() < vecs ? dot(q[r * CHUNKS + c], k[c]) : 0.0;
                sum = sum_over_lanes(sum);
                own[r] = lane() == l ? sum : own[r];
            }
        }
        [[unroll]] for (uint r = 0u; r < ROWS; ++r)
            if (r < USED_ROWS) s[r * GROUPS + g] = own[r];
    }
}

// One block of keys: from dot products to weights, in s; `shrink` is by how much what each row has so far shrinks.
void weigh(inout Rows rows, inout float s[ROWS * GROUPS], ScoreRule rule, bool plain, uint j0, uint end,
           out float shrink[ROWS]) {
    for (uint i = 0u; i < only_if(!plain, USED_ROWS * GROUPS); ++i)
        s[i] = masked_score(s[i], rule, rows.at[i / GROUPS], j0 + lane() + LANES * (i % GROUPS));
    float scale = plain ? rule.scale : 1.0;
    [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        if (r >= USED_ROWS) continue;
        float x[GROUPS], new_max = rows.row_max[r], sum = 0.0;
        [[unroll]] for (uint g = 0u; g < GROUPS; ++g) {
            x[g] = j0 + lane() + LANES * g < end ? s[r * GROUPS + g] * scale : uintBitsToFloat(MINUS_INFINITY);
            new_max = max(new_max, x[g]);
        }
        new_max = max_over_lanes(new_max);
        [[unroll]] for (uint g = 0u; g < GROUPS; ++g) {
            float p = floatBitsToUint(x[g]) == MINUS_INFINITY ? 0.0 : exp(x[g] - new_max);
            sum += p;
            s[r * GROUPS + g] = p;
        }
        shrink[r] = exp(rows.row_max[r] - new_max);
        rows.row_sum[r] = rows.row_sum[r] * shrink[r] + sum;
        rows.row_max[r] = new_max;
    }
}

// The block's part of each row's output. A weight of 0 must not meet an infinity or a NaN.
void products(out vec4 part[ROWS * CHUNKS], float p[ROWS * GROUPS], uint value_at, uint j0, uint end) {
    uint step = value_step(), vecs = value_vecs();
    [[unroll]] for (uint i = 0u; i < ROWS * CHUNKS; ++i) part[i] = vec4(0.0);
    for (uint g = 0u; g < min(GROUPS, (end - j0 + LANES - 1u) / LANES); ++g) {
        float own[ROWS];
        [[unroll]] for (uint r = 0u; r < ROWS; ++r)
            if (r < USED_ROWS) own[r] = p[r * GROUPS + g];
        [[dont_unroll]] for (uint l = 0u; l < LANES; ++l) {
            uint at = value_at + min(j0 + g * LANES + l, end - 1u) * step;
            vec4 v[CHUNKS];
            [[unroll]] for (uint c = 0u; c < CHUNKS; ++c)
                if (c < VALUE_CHUNKS) v[c] = read_value(at, vec_index(c, vecs));
            [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
                if (r >= USED_ROWS) continue;
                float weight = subgroupShuffle(own[r], l);
                [[unroll]] for (uint c = 0u; c < CHUNKS; ++c) {
                    if (c >= VALUE_CHUNKS) continue;
                    vec4 sum = part[r * CHUNKS + c];
                    part[r * CHUNKS + c] = mix(sum, fma(vec4(weight), v[c], sum), bvec4(weight != 0.0));
                }
            }
        }
    }
}

// What a factor of 0 wipes out may be infinite.
vec4 shrunk(vec4 sum, float factor) { return mix(vec4(0.0), sum * factor, bvec4(factor != 0.0)); }

// Whether this workgroup is the last of the item's splits. The ticket counter is 0 again when the last one has come.
bool is_last(uint item) {
    uint ticket = 0u;
    memoryBarrierBuffer();
    subgroupBarrier();
    if (lane() == 0u) {
        ticket = atomicAdd(tickets[push.tickets_base + item], 1u);
        if (ticket + 1u == num_splits()) tickets[push.tickets_base + item] = 0u;
    }
    ticket = subgroupShuffle(ticket, 0u);
    memoryBarrierBuffer();
    return ticket + 1u == num_splits();
}

void main() {
    uint items = num_row_tiles() * num_splits();
    ScoreRule rule = score_rule();
    bool unchanged = rule.mask_kind == 0u && rule.softcap == 0.0 && (flags() & FLAG_ALIBI) == 0u;
    for (uint index = gl_WorkGroupID.x; index < items; index += gl_NumWorkGroups.x) {
        uint item = index / num_splits(), split = index % num_splits();
        RowTile tile = row_tile(item);
        uint begin = tile_key_begin(tile) + split * keys_per_split();
        uint end = min(begin + keys_per_split(), tile_key_end(tile)), live = min(tile.rows - tile.first, USED_ROWS);
        uint key_at = key_place(tile.b, tile.hk), value_at = value_place(tile.b, tile.hk);
        uint all_begin = 0u, all_end = 0xFFFFFFFFu;
        Rows rows;
        vec4 q[ROWS * CHUNKS], acc[ROWS * CHUNKS], part[ROWS * CHUNKS];  // part: the block's of acc
        float s[ROWS * GROUPS], shrink[ROWS];
        [[dont_unroll]] for (uint r = 0u; r < USED_ROWS; ++r) {
            uint row = tile.first + min(r, live - 1u);
            uint at = push.query_base + tile.b * q_stride_batch() + row_head(tile, row) * q_stride_head()
                      + row_token(row) * q_stride_row();
            rows.at[r] = score_row(tile, row);
            all_begin = max(all_begin, rows.at[r].begin);
            all_end = min(all_end, rows.at[r].end);
            rows.row_max[r] = LOWEST;
            rows.row_sum[r] = 0.0;
            [[dont_unroll]] for (uint c = 0u; c < KEY_CHUNKS; ++c) {
                uint d = c * LANES + lane();
                q[r * CHUNKS + c] = d < head_vecs() ? read_query(at + d) : vec4(0.0);
            }
        }
        [[unroll]] for (uint i = 0u; i < ROWS * CHUNKS; ++i) acc[i] = vec4(0.0);
        [[unroll]] for (uint i = 0u; i < ROWS * GROUPS; ++i) s[i] = 0.0;

        for (uint j0 = begin; j0 < end; j0 += BLOCK) {
            bool plain = unchanged && j0 >= all_begin && min(j0 + BLOCK, end) <= all_end;
            dot_products(q, key_at, j0, end, s);
            weigh(rows, s, rule, plain, j0, end, shrink);
            products(part, s, value_at, j0, end);
            [[unroll]] for (uint r = 0u; r < ROWS; ++r)
                [[unroll]] for (uint c = 0u; c < CHUNKS; ++c)
                    if (r < USED_ROWS && c < VALUE_CHUNKS)
                        acc[r * CHUNKS + c] = shrunk(acc[r * CHUNKS + c], shrink[r]) + part[r * CHUNKS + c];
        }

        for (uint r = 0u; r < live; ++r) {
            uint at = part_index(item, split, r);
            vec2 whole = vec2(rows.row_max[r], sum_over_lanes(rows.row_sum[r]));
            if (lane() == 0u) parts[at] = vec4(whole, 0.0, 0.0);
            for (uint e = lane(); e < value_vecs(); e += LANES) parts[at + 1u + e] = acc[r * CHUNKS + e / LANES];
        }
        uint finished = is_last(item) ? live : 0u;
        for (uint r = 0u; r < finished; ++r) {
            for (uint e = lane(); e < out_vecs(); e += LANES) {
                vec4 sum;
                vec2 whole = merge_vec(part_index(item, 0u, r), min(e, value_vecs() - 1u), 0u, 1u, sum);
                write_out(tile, tile.first + r, e, e < value_vecs() ? sum : vec4(0.0), whole);
                if (e == 0u) write_lse(tile, tile.first + r, whole);
            }
        }
    }
}
