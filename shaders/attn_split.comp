// Purpose   decode and other short queries, without subgroup operations: the rows of one KV head share each K/V read,
//           the keys are split over workgroups, and the last workgroup of a head merges the parts in the same dispatch
// Maths     s_j = score of key j;  m' = max(m, s_j);  l' = l e^(m-m') + sum_j e^(s_j-m')
//           acc' = acc e^(m-m') + sum_j e^(s_j-m') v_j;  out = acc / l;  lse = m + ln l
// Bindings  0 params  1 query [B, H, L, D]  2 key [B, Hkv, S, D]  3 value [B, Hkv, S, Ev]  4 mask
//           5 parts [item, split, ROWS, 1 + value vecs] vec4s  6 tickets [item], 0 before and after every run
//           7 out [B, H, L, Ev]  8 lse [B, H, L]. An item is ROWS rows of one (batch, KV head). Keys and values of any
//           format (vkattn/formats.py)
// Grid      any number of workgroups of 64; each takes one (item, split) after another, 256 keys at a time: an
//           invocation computes the scores of 4 keys, then 16 share the softmax of a row, then each sums one vec
// Push      params_base (words); query_base, key_base, value_base, out_base (vecs; of quantised rows quads); mask_base,
//           tickets_base, lse_base (words); parts_base (vec4s)
// Bounds    head_dim and value_dim to 256. Only keys in the union of the rows' visible ranges are read
// Requires  nothing beyond Vulkan 1.1
// Source    Flash-Decoding (Dao et al. 2023); Milakov and Gimelshein 2018
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

#define THREADS 64u
layout(local_size_x = 64) in;
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
#define BLOCK_ROWS uint(ROWS)

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

const uint MAX_VECS = 64u;           // vecs of head_dim or value_dim at most
const uint CHUNK = 32u;              // vecs of value_dim that are summed at once; there are two chunks
const uint KEYS = 4u * THREADS;      // keys of a block
const uint SHARERS = THREADS / ROWS;  // invocations that share a row's softmax

shared vec4 q_tile[ROWS * MAX_VECS];
shared vec4 p_tile[ROWS * THREADS];       // dot products, then weights, of a block: four keys to a vec4
shared float lane_max[THREADS], lane_sum[THREADS];
shared float row_shrink[ROWS], row_max_of[ROWS];
shared vec4 merge_sums[THREADS];
#define WAY_SUMS merge_sums
#include "split.glsl"

void load_queries(RowTile tile) {
    for (uint i = gl_LocalInvocationIndex; i < uint(ROWS) * head_vecs(); i += THREADS) {
        uint r = i / head_vecs(), d = i % head_vecs(), row = tile.first + r;
        vec4 x = vec4(0.0);
        if (row < tile.rows)
            x = read_query(push.query_base + tile.b * q_stride_batch() + row_head(tile, row) * q_stride_head()
                           + row_token(row) * q_stride_row() + d);
        q_tile[r * MAX_VECS + d] = x;
    }
}

// Dot products of four keys with each row, into p_tile.
void dot_products(RowTile tile, uint j0, uint end) {
    uint lane = gl_LocalInvocationIndex, j = j0 + 4u * lane;
    uint step = key_step(), at = key_place(tile.b, tile.hk) + j * step, vecs = head_vecs();
    uint rows = min(tile.rows - tile.first, uint(ROWS));
    vec4 s[ROWS] = vec4[](vec4(0.0), vec4(0.0), vec4(0.0), vec4(0.0));
    if (j < end) {
        // Beyond the last key the last one is read again: those products are never looked at.
        uint last = end - 1u - j;
        uint at1 = at + min(1u, last) * step, at2 = at + min(2u, last) * step, at3 = at + min(3u, last) * step;
        for (uint d = 0u; d < vecs; ++d) {
            vec4 k0 = read_key(at, d), k1 = read_key(at1, d);
            vec4 k2 = read_key(at2, d), k3 = read_key(at3, d);
            [[unroll]] for (uint r = 0u; r < uint(ROWS); ++r) {
                if (r < rows) {
                    vec4 q = q_tile[r * MAX_VECS + d];
                    s[r] += vec4(dot(q, k0), dot(q, k1), dot(q, k2), dot(q, k3));
                }
            }
        }
    }
    [[unroll]] for (uint r = 0u; r < uint(ROWS); ++r) p_tile[r * THREADS + lane] = s[r];
}

// From dot products to weights, for the row that this invocation shares; returns the row's new maximum.
float weigh(ScoreRule rule, ScoreRow row, uint j0, uint end, float row_max, inout float own_sum) {
    uint lane = gl_LocalInvocationIndex, slot = lane / SHARERS, sharer = lane % SHARERS;
    float new_max = row_max;
    bool plain = is_plain(rule, row, j0, min(j0 + KEYS, end) - 1u);
    for (uint i = sharer; i < THREADS; i += SHARERS) {
        uint j = j0 + 4u * i;
        vec4 x = p_tile[slot * THREADS + i];
        if (plain) {
            x = mix(vec4(uintBitsToFloat(MINUS_INFINITY)), x * rule.scale, lessThan(uvec4(j, j + 1u, j + 2u, j + 3u),
                                                                               uvec4(end)));
        } else {
            x = vec4(masked_score(x.x, rule, row, j), masked_score(x.y, rule, row, j + 1u),
                     masked_score(x.z, rule, row, j + 2u), masked_score(x.w, rule, row, j + 3u));
            x = mix(vec4(uintBitsToFloat(MINUS_INFINITY)), x, lessThan(uvec4(j, j + 1u, j + 2u, j + 3u), uvec4(end)));
        }
        p_tile[slot * THREADS + i] = x;
        new_max = max(new_max, max(max(x.x, x.y), max(x.z, x.w)));
    }
    lane_max[lane] = new_max;
    barrier();
    for (uint i = 0u; i < SHARERS; ++i) new_max = max(new_max, lane_max[slot * SHARERS + i]);
    float shrink = exp(row_max - new_max), sum = 0.0;
    for (uint i = sharer; i < THREADS; i += SHARERS) {
        vec4 x = p_tile[slot * THREADS + i];
        vec4 p = mix(vec4(0.0), exp(x - new_max), notEqual(floatBitsToUint(x), uvec4(MINUS_INFINITY)));
        p_tile[slot * THREADS + i] = p;
        sum += (p.x + p.y) + (p.z + p.w);
    }
    own_sum = own_sum * shrink + sum;
    if (sharer == 0u) {
        row_shrink[slot] = shrink;
        row_max_of[slot] = new_max;
    }
    return new_max;
}

uvec4 exponent_bits(vec4 v) { return floatBitsToUint(v) & 0x7F800000u; }

// One vec of value_dim, over every `deep`-th group of four keys of the block.
vec4[ROWS] weighted_values(uint at, uint e, uint j0, uint end, uint first, uint deep, uint rows) {
    vec4 part[ROWS] = vec4[](vec4(0.0), vec4(0.0), vec4(0.0), vec4(0.0));
    uint step = value_step();
    for (uint g = first; j0 + 4u * g < end && g < THREADS; g += deep) {
        uint j = j0 + 4u * g, from = at + j * step;
        vec4 v0 = read_value(from, e), v1 = vec4(0.0), v2 = vec4(0.0), v3 = vec4(0.0);
        if (j + 1u < end) v1 = read_value(from + step, e);
        if (j + 2u < end) v2 = read_value(from + 2u * step, e);
        if (j + 3u < end) v3 = read_value(from + 3u * step, e);
        uvec4 exponent = max(max(exponent_bits(v0), exponent_bits(v1)), max(exponent_bits(v2), exponent_bits(v3)));
        bool clean = all(lessThan(exponent, uvec4(0x7F800000u)));  // neither infinity nor NaN
        [[unroll]] for (uint r = 0u; r < uint(ROWS); ++r) {
            if (r < rows) {
                vec4 p = p_tile[r * THREADS + g];
                if (clean || p.x != 0.0) part[r] = fma(vec4(p.x), v0, part[r]);
                if (clean || p.y != 0.0) part[r] = fma(vec4(p.y), v1, part[r]);
                if (clean || p.z != 0.0) part[r] = fma(vec4(p.z), v2, part[r]);
                if (clean || p.w != 0.0) part[r] = fma(vec4(p.w), v3, part[r]);
            }
        }
    }
    return part;
}

void main() {
    uint lane = gl_LocalInvocationIndex;
    ScoreRule rule = score_rule();
    uint width = 1u;  // invocations side by side in a row of values
    while (width < min(out_vecs(), CHUNK)) width *= 2u;
    uint x = lane % width, y = lane / width, deep = THREADS / width;
    uint items = num_row_tiles() * num_splits();

    for (uint index = gl_WorkGroupID.x; index < items; index += gl_NumWorkGroups.x) {
        uint item = index / num_splits(), split = index % num_splits();
        RowTile tile = row_tile(item);
        uint begin = tile_key_begin(tile) + split * keys_per_split();
        uint end = min(begin + keys_per_split(), tile_key_end(tile));
        uint rows = min(tile.rows - tile.first, uint(ROWS));
        uint value_at = value_place(tile.b, tile.hk);
        ScoreRow row = score_row(tile, tile.first + lane / SHARERS);
        float row_max = LOWEST, own_sum = 0.0;
        vec4 acc[2 * ROWS];
        [[unroll]] for (uint i = 0u; i < 2u * uint(ROWS); ++i) acc[i] = vec4(0.0);

        barrier();
        load_queries(tile);
        if (lane < uint(ROWS)) row_max_of[lane] = LOWEST;
        barrier();
        for (uint j0 = begin; j0 < end; j0 += KEYS) {
            dot_products(tile, j0, end);
            barrier();
            row_max = weigh(rule, row, j0, end, row_max, own_sum);
            barrier();
            [[unroll]] for (uint c = 0u; c < 2u; ++c) {
                uint e = c * CHUNK + x;
                if (e < value_vecs()) {
                    vec4 part[ROWS] = weighted_values(value_at, e, j0, end, y, deep, rows);
                    [[unroll]] for (uint r = 0u; r < uint(ROWS); ++r)
                        acc[c * ROWS + r] = fma(acc[c * ROWS + r], vec4(row_shrink[r]), part[r]);
                }
            }
            barrier();
        }

        lane_sum[lane] = own_sum;
        barrier();
        [[unroll]] for (uint r = 0u; r < uint(ROWS); ++r) {
            if (r < rows) {
                vec2 whole = vec2(row_max_of[r], 0.0);
                for (uint i = 0u; i < SHARERS; ++i) whole.y += lane_sum[r * SHARERS + i];
                uint at = part_index(item, split, r);
                [[unroll]] for (uint c = 0u; c < 2u; ++c) {
                    if (c * CHUNK < out_vecs()) {
                        barrier();
                        merge_sums[lane] = acc[c * ROWS + r];
                        barrier();
                        uint e = c * CHUNK + x;
                        vec4 sum = acc[c * ROWS + r];
                        for (uint other = 1u; other < deep; ++other) sum += merge_sums[other * width + x];
                        if (y == 0u && num_splits() == 1u && e < out_vecs())
                            write_out(tile, tile.first + r, e, e < value_vecs() ? sum : vec4(0.0), whole);
                        if (y == 0u && num_splits() > 1u && e < value_vecs()) parts[at + 1u + e] = sum;
                    }
                }
                if (lane == 0u && num_splits() == 1u) write_lse(tile, tile.first + r, whole);
                else if (lane == 0u) parts[at] = vec4(whole, 0.0, 0.0);
            }
        }
        if (num_splits() > 1u && is_last(item)) merge_parts(tile, item);
    }
}
