// Purpose   attention in one dispatch on matrix units, for prefill: operands in half precision, sums in float32
// Maths     s_j = masked score (include/score.glsl) in base 2;  m' = max(m, max_j s_j);  l' = l 2^(m-m') + sum_j p_j with
//           p_j = 2^(s_j-m'+12);  acc' = acc 2^(m-m') + sum_j half(p_j) v_j, a tile of keys at a time;  out = acc / l
//           lse = (m - 12) ln 2 + ln l. A row with nothing to attend gives 0 and lse = minus infinity (or the sink)
// Bindings  0 params  1 query [B, H, L, D] quads  2 key [B, Hkv, S, D] quads  3 value [B, Hkv, S, Ev] quads  4 mask,
//           broadcast to [B, H, L, S]  5 out [B, H, L, Ev]  6 lse [B, H, L] float32, rows padded to 4 with 0, written if
//           FLAG_LSE is set. Strides are in params
// Grid      any number of workgroups of 4 subgroups; each takes BLOCK_ROWS rows after another, the rows that see most
//           keys first. A subgroup has EDGE rows: their queries and sums are matrices in registers; a tile of 32 keys,
//           then of values, is staged for all. While a tile is multiplied, the next one is on the way
// Push      params_base (words); chunk (of tiles_per_chunk row tiles); query_base, key_base, value_base (vecs);
//           mask_base (words); out_base (vecs); lse_base (words)
// Bounds    keys and values outside the tile's visible range are not read, nor rows beyond q_len. A tile of keys that
//           the mask closes for all rows is not read either. Values that are not finite are multiplied as 0 in a tile
//           of which some row does not see all, and added by themselves to the rows that attend them
// Requires  matrices of EDGE x EDGE x EDGE at subgroup scope and subgroups of LANES. rows = quad: each four lanes hold
//           whole rows of an accumulator in the order of an A operand (the self-test tells), so that scores stay in
//           registers; rows = shared: scores go through shared memory, in any order
// Source    Dao 2023 (arXiv 2307.08691); Milakov and Gimelshein 2018
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_vote : require
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#if defined(DTYPE_BF16)
#extension GL_EXT_bfloat16 : require
#endif

#if defined(LANES_L8)
#define LANES 8u
#define EDGE 8u
#elif defined(LANES_L32)
#define LANES 32u
#define EDGE 16u
#elif defined(LANES_L64)
#define LANES 64u
#define EDGE 16u
#endif
#if defined(WIDTH_D64)
#define WIDTH 64u
#elif defined(WIDTH_D128)
#define WIDTH 128u
#elif defined(WIDTH_D256)
#define WIDTH 256u
#endif
#define SUBGROUPS 4u
#define THREADS (SUBGROUPS * LANES)
#define BLOCK_ROWS (SUBGROUPS * EDGE)
#ifndef BLOCK_KEYS
#define BLOCK_KEYS 32u
#endif
#if defined(LANES_L8)
layout(local_size_x = 32) in;
#elif defined(LANES_L32)
layout(local_size_x = 128) in;
#else
layout(local_size_x = 256) in;
#endif
#include "coopmat.glsl"

#define QUERIES coopmat<ELEMENT, gl_ScopeSubgroup, EDGE, EDGE, gl_MatrixUseA>
#define KEYS coopmat<ELEMENT, gl_ScopeSubgroup, EDGE, EDGE, gl_MatrixUseB>
#define SUMS coopmat<float, gl_ScopeSubgroup, EDGE, EDGE, gl_MatrixUseAccumulator>
const uint COL_TILES = WIDTH / EDGE;       // matrices across head_dim and value_dim
const uint KEY_TILES = BLOCK_KEYS / EDGE;  // and across a tile of keys
const uint EDGE_QUADS = EDGE / 8u;

#if defined(ROWS_QUAD)
const uint OWN_ROWS = 2u;                     // rows of which an invocation holds elements
const uint S_PITCH = EDGE / 4u + 1u;          // only outputs pass through `scores`
#else
const uint OWN_ROWS = 1u;
const uint S_PITCH = BLOCK_KEYS / 4u + 1u;
const uint ROW_LANES = LANES / EDGE;          // invocations to a row in the softmax
const uint ROW_VECS = BLOCK_KEYS / 4u / ROW_LANES;
const uint P_PITCH = BLOCK_KEYS / 8u + 1u;
shared uvec4 weights[BLOCK_ROWS * P_PITCH];
#endif
shared uvec4 stage[2u * BLOCK_KEYS * PITCH];  // keys, then values; before them, the queries
shared vec4 scores[BLOCK_ROWS * S_PITCH];     // each subgroup has its own rows
shared float row_factor[BLOCK_ROWS];
const uint VALUES = BLOCK_KEYS * PITCH;       // where the values start

// One row of the softmax; row_sum is that of the invocation's own keys only.
struct Online {
    float row_max, row_sum;
};

// The first row of this subgroup in the tile.
uint own_rows() { return gl_SubgroupID * EDGE; }

// The row in the tile whose state `i` this invocation holds.
uint held_row(uint i) {
#if defined(ROWS_QUAD)
    return own_rows() + gl_SubgroupInvocationID / 4u + 8u * i;
#else
    return own_rows() + gl_SubgroupInvocationID / ROW_LANES;
#endif
}

// Takes tile.first + [0, BLOCK_ROWS) into the registers of the subgroups, by way of `stage`.
void load_queries(RowTile tile, uint quads, out QUERIES q[COL_TILES]) {
    for (uint i = gl_LocalInvocationIndex; i < BLOCK_ROWS * ROW_QUADS; i += THREADS) {
        uint row = tile.first + i / ROW_QUADS, quad = i % ROW_QUADS;
        bool live = row < tile.rows && quad < quads;
        stage[i / ROW_QUADS * PITCH + quad] = live ? query[query_row(tile, row) / 2u + quad] : uvec4(0u);
    }
    barrier();
    [[unroll]] for (uint d = 0u; d < COL_TILES; ++d)
        coopMatLoad(q[d], stage, own_rows() * PITCH + d * EDGE_QUADS, PITCH, gl_CooperativeMatrixLayoutRowMajor);
    barrier();
}

#define FETCH(held, rows_of, at, step, col0, end, quads)                                    \
    [[unroll]] for (uint i = 0u; i < FETCHES; ++i) {                                        \
        uint n = gl_LocalInvocationIndex + THREADS * i, j = (col0) + n / ROW_QUADS;         \
        bool live = j < (end) && n % ROW_QUADS < (quads);                                   \
        held[i] = live ? rows_of[(at) + j * (step) + n % ROW_QUADS] : uvec4(0u);            \
    }

void stash(uvec4 held[FETCHES], uint at) {
    [[unroll]] for (uint i = 0u; i < FETCHES; ++i) {
        uint n = gl_LocalInvocationIndex + THREADS * i;
        stage[at + n / ROW_QUADS * PITCH + n % ROW_QUADS] = held[i];
    }
}

// The same for values of a tile that not every row sees whole: what is not finite is left out and its key noted.
void stash_finite(uvec4 held[FETCHES], uint parity) {
    [[unroll]] for (uint i = 0u; i < FETCHES; ++i) {
        uint n = gl_LocalInvocationIndex + THREADS * i, j = n / ROW_QUADS;
        stage[VALUES + j * PITCH + n % ROW_QUADS] = only_finite(held[i]);
        if (not_finite(held[i]) != 0u)
            atomicOr(dirty_keys[parity * (BLOCK_KEYS / 32u) + j / 32u], 1u << (j % 32u));
    }
}

// The products of the subgroup's queries with the staged keys.
void multiply_keys(QUERIES q[COL_TILES], out SUMS s[KEY_TILES]) {
    [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n) s[n] = SUMS(0.0);
    [[unroll]] for (uint d = 0u; d < COL_TILES; ++d) {
        [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n) {
            KEYS k;
            coopMatLoad(k, stage, n * EDGE * PITCH + d * EDGE_QUADS, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
            s[n] = coopMatMulAdd(q[d], k, s[n]);
        }
    }
}

// Ends the step from one maximum to the next: what the row has so far shrinks by the factor that is returned.
float advance(inout Online online, float new_max, float sum) {
    float factor = exp2(online.row_max - new_max);
    online = Online(new_max, online.row_sum * factor + sum);
    return factor;
}

#if defined(ROWS_QUAD)
// Turns dot products into weights. Component i of an accumulator is of row i / 2 % 2 of the two that the invocation
// holds, key 8 (i / 4) + 2 (lane % 4) + i % 2; component i of an A operand is the same element.
void weigh(bool plain, ScoreRule rule, RowTile tile, uint col0, inout SUMS s[KEY_TILES], inout SUMS acc[COL_TILES],
           inout Online online[OWN_ROWS], out QUERIES p[KEY_TILES]) {
    if (plain) {
        float scale_2 = rule.scale * LOG2_E;
        [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n) s[n] *= scale_2;
    } else {
        [[unroll]] for (uint h = 0u; h < OWN_ROWS; ++h) {
            ScoreRow row = score_row(tile, tile.first + held_row(h));
            uint j = col0 + gl_SubgroupInvocationID % 4u * 2u;
            [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n)
                [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                    uint at = i / 2u * 4u + 2u * h + i % 2u;
                    s[n][at] = score_2(s[n][at], rule, row, j + EDGE * n + i / 2u * 8u + i % 2u);
                }
        }
    }
    float factor[OWN_ROWS];
    [[unroll]] for (uint h = 0u; h < OWN_ROWS; ++h) {
        float new_max = online[h].row_max;
        [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n)
            [[unroll]] for (uint i = 0u; i < 4u; ++i) new_max = max(new_max, s[n][i / 2u * 4u + 2u * h + i % 2u]);
        new_max = max(new_max, subgroupShuffleXor(new_max, 1u));
        new_max = max(new_max, subgroupShuffleXor(new_max, 2u));
        float sum = 0.0, shift = HEADROOM - new_max;
        [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n)
            [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                uint at = i / 2u * 4u + 2u * h + i % 2u;
                float weight = exp2(s[n][at] + shift);
                sum += weight;
                p[n][at] = ELEMENT(weight);
            }
        factor[h] = advance(online[h], new_max, sum);
    }
    if (subgroupAny(factor[0] != 1.0 || factor[1] != 1.0)) {
        [[unroll]] for (uint d = 0u; d < COL_TILES; ++d)
            [[unroll]] for (uint i = 0u; i < 8u; ++i) acc[d][i] *= factor[i / 2u % 2u];
    }
}
#else
// Turns dot products into weights, by way of `scores`, where ROW_LANES invocations share a row.
void weigh(bool plain, ScoreRule rule, RowTile tile, uint col0, inout SUMS s[KEY_TILES], inout SUMS acc[COL_TILES],
           inout Online online[OWN_ROWS], out QUERIES p[KEY_TILES]) {
    uint mine = own_rows() * S_PITCH;
    [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n)
        coopMatStore(s[n], scores, mine + n * EDGE / 4u, S_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroupBarrier();
    uint part = gl_SubgroupInvocationID % ROW_LANES, r = held_row(0u);
    vec4 own[ROW_VECS];
    float new_max = online[0].row_max;
    if (plain) {
        float scale_2 = rule.scale * LOG2_E;
        [[unroll]] for (uint i = 0u; i < ROW_VECS; ++i) own[i] = scores[r * S_PITCH + part + ROW_LANES * i] * scale_2;
    } else {
        ScoreRow row = score_row(tile, tile.first + r);
        [[unroll]] for (uint i = 0u; i < ROW_VECS; ++i) {
            uint v = part + ROW_LANES * i;
            vec4 dots = scores[r * S_PITCH + v];
            [[unroll]] for (uint c = 0u; c < 4u; ++c) own[i][c] = score_2(dots[c], rule, row, col0 + 4u * v + c);
        }
    }
    [[unroll]] for (uint i = 0u; i < ROW_VECS; ++i)
        new_max = max(new_max, max(max(own[i].x, own[i].y), max(own[i].z, own[i].w)));
    [[unroll]] for (uint step = 1u; step < ROW_LANES; step *= 2u)
        new_max = max(new_max, subgroupShuffleXor(new_max, step));
    float sum = 0.0, shift = HEADROOM - new_max;
    [[unroll]] for (uint i = 0u; i < ROW_VECS; ++i) {
        vec4 weight = exp2(own[i] + shift);
        sum += (weight.x + weight.y) + (weight.z + weight.w);
        uint v = part + ROW_LANES * i;
        uvec2 words = half_words(weight);
        if (v % 2u == 0u) weights[r * P_PITCH + v / 2u].xy = words;
        else weights[r * P_PITCH + v / 2u].zw = words;
    }
    float factor = advance(online[0], new_max, sum);
    subgroupBarrier();
    for (uint i = part; i < EDGE / 4u; i += ROW_LANES) scores[r * S_PITCH + i] = vec4(factor);  // a matrix of them
    subgroupBarrier();
    if (subgroupAny(factor != 1.0)) {
        SUMS factors;
        coopMatLoad(factors, scores, mine, S_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        [[unroll]] for (uint d = 0u; d < COL_TILES; ++d) acc[d] *= factors;
    }
    [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n)
        coopMatLoad(p[n], weights, own_rows() * P_PITCH + n * EDGE_QUADS, P_PITCH, gl_CooperativeMatrixLayoutRowMajor);
}
#endif

void add_values(QUERIES p[KEY_TILES], inout SUMS acc[COL_TILES]) {
    [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n) {
        [[unroll]] for (uint d = 0u; d < COL_TILES; ++d) {
            KEYS v;
            coopMatLoad(v, stage, VALUES + n * EDGE * PITCH + d * EDGE_QUADS, PITCH,
                        gl_CooperativeMatrixLayoutRowMajor);
            acc[d] = coopMatMulAdd(p[n], v, acc[d]);
        }
    }
}

// Adds the values of key `j` that are not finite to the rows that attend it (rare). Which element a component is
// comes from a matrix that holds its own indices.
void add_not_finite(ScoreRule rule, RowTile tile, uint at, uint j, uint quads, inout SUMS acc[COL_TILES]) {
    uint mine = own_rows() * S_PITCH;
    for (uint i = gl_SubgroupInvocationID; i < EDGE * EDGE / 4u; i += LANES) {
        float first = float(4u * i);
        scores[mine + i / (EDGE / 4u) * S_PITCH + i % (EDGE / 4u)] = vec4(first, first + 1.0, first + 2.0, first + 3.0);
    }
    subgroupBarrier();
    SUMS index;
    coopMatLoad(index, scores, mine, S_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    for (uint i = 0u; i < index.length(); ++i) {
        uint place = uint(index[i]), row = tile.first + own_rows() + place / EDGE, c = place % EDGE;
        if (!attended(rule, score_row(tile, row), j)) continue;
        [[unroll]] for (uint d = 0u; d < COL_TILES; ++d) {
            uint quad = d * EDGE_QUADS + c / 8u;
            float v = quad < quads ? quad_element(value[at + quad], c % 8u) : 0.0;
            if (isnan(v) || isinf(v)) acc[d][i] += v;
        }
    }
    subgroupBarrier();
}

// Ends the rows of the subgroup and writes them.
void write_rows(RowTile tile, Online online[OWN_ROWS], SUMS acc[COL_TILES]) {
    bool with_lse = (flags() & FLAG_LSE) != 0u;
#if defined(ROWS_QUAD)
    const uint SHARERS = 4u;
#else
    const uint SHARERS = ROW_LANES;
#endif
    [[unroll]] for (uint h = 0u; h < OWN_ROWS; ++h) {
        float sum = online[h].row_sum;
        [[unroll]] for (uint step = 1u; step < SHARERS; step *= 2u) sum += subgroupShuffleXor(sum, step);
        if (gl_SubgroupInvocationID % SHARERS == 0u)
            row_factor[held_row(h)] = finish_row(tile, tile.first + held_row(h),
                                                 (online[h].row_max - HEADROOM) * LN_2, sum, with_lse);
    }
    uint mine = own_rows() * S_PITCH, vecs = out_vecs();
    [[unroll]] for (uint d = 0u; d < COL_TILES; ++d) {
        subgroupBarrier();
        coopMatStore(acc[d], scores, mine, S_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        subgroupBarrier();
        [[unroll]] for (uint i = gl_SubgroupInvocationID; i < EDGE * EDGE / 4u; i += LANES) {
            uint r = own_rows() + i / (EDGE / 4u), e = d * (EDGE / 4u) + i % (EDGE / 4u), row = tile.first + r;
            vec4 sum = scores[r * S_PITCH + i % (EDGE / 4u)] * row_factor[r];
            if (row < tile.rows && e < vecs) outputs[out_row(tile, row) + e] = half_words(sum);
        }
    }
}

void main() {
    uint first = min(push.chunk * tiles_per_chunk(), num_row_tiles());
    uint tiles = min(tiles_per_chunk(), num_row_tiles() - first);
    uint head_quads = (head_vecs() + 1u) / 2u, value_quads = (value_vecs() + 1u) / 2u;
    uint key_step = k_stride_row() / 2u, value_step = v_stride_row() / 2u, stamp = 0u, parity = 0u;
    ScoreRule rule = score_rule();
    bool unchanged = rule.mask_kind == 0u && rule.softcap == 0.0 && (flags() & FLAG_ALIBI) == 0u;
    const uint WORDS = BLOCK_KEYS / 32u;
    if (gl_LocalInvocationIndex < 2u * WORDS) dirty_keys[gl_LocalInvocationIndex] = 0u;

    for (uint item = gl_WorkGroupID.x; item < tiles; item += gl_NumWorkGroups.x) {
        RowTile tile = heaviest_first(first + item);
        uint begin = tile_key_begin(tile), end = tile_key_end(tile);
        uint all_begin = key_begin(tile.b, row_token(min(tile.first + BLOCK_ROWS, tile.rows) - 1u));
        uint all_end = key_end(tile.b, row_token(tile.first));
        uint key_at = (push.key_base + key_offset() + tile.b * k_stride_batch() + tile.hk * k_stride_head()) / 2u;
        uint value_at = (push.value_base + value_offset() + tile.b * v_stride_batch() + tile.hk * v_stride_head()) / 2u;

        QUERIES q[COL_TILES];
        load_queries(tile, head_quads, q);
        Online online[OWN_ROWS];
        [[unroll]] for (uint h = 0u; h < OWN_ROWS; ++h) online[h] = Online(LOWEST, 0.0);
        SUMS acc[COL_TILES];
        [[unroll]] for (uint d = 0u; d < COL_TILES; ++d) acc[d] = SUMS(0.0);

        uvec4 held[FETCHES];
        uint col0 = next_open(rule, tile, begin, end, stamp);
        if (col0 < end) {
            FETCH(held, key, key_at, key_step, col0, end, head_quads)
            stash(held, 0u);
        }
        barrier();
        while (col0 < end) {
            bool plain = unchanged && col0 >= all_begin && col0 + BLOCK_KEYS <= all_end;
            parity ^= 1u;
            FETCH(held, value, value_at, value_step, col0, end, value_quads)
            SUMS s[KEY_TILES];
            QUERIES p[KEY_TILES];
            multiply_keys(q, s);
            weigh(plain, rule, tile, col0, s, acc, online, p);
            if (plain) stash(held, VALUES);
            else stash_finite(held, parity);
            barrier();
            uint next = next_open(rule, tile, col0 + BLOCK_KEYS, end, stamp);
            if (next < end) {
                FETCH(held, key, key_at, key_step, next, end, head_quads)
            }
            add_values(p, acc);
            if (!plain) {
                for (uint w = 0u; w < WORDS; ++w) {
                    uint dirty = dirty_keys[parity * WORDS + w];
                    while (dirty != 0u) {
                        uint j = col0 + 32u * w + uint(findLSB(dirty));
                        add_not_finite(rule, tile, value_at + j * value_step, j, value_quads, acc);
                        dirty &= dirty - 1u;
                    }
                }
            }
            if (gl_LocalInvocationIndex < WORDS) dirty_keys[(parity ^ 1u) * WORDS + gl_LocalInvocationIndex] = 0u;
            if (next < end) stash(held, 0u);
            barrier();
            col0 = next;
        }
        write_rows(tile, online, acc);
        barrier();
    }
}
