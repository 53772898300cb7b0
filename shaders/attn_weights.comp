// Purpose   pass 1 of the three-pass attention: the scores of one chunk of query rows
// Maths     s[r, j] = softcap(scale * <q_r, k_j>) - slope * |p_r - j| + mask[r, j], minus infinity where masked
// Bindings  0 params  1 query [B, H, L, D]  2 key [B, Hkv, S, D]  3 mask, broadcast to [B, H, L, S]
//           4 scores [row tile in chunk, 32, score_stride] float32 vec4s. Strides are in params. Keys of any format
//           (vkattn/formats.py)
// Grid      any number of workgroups; each takes one 32 x 64 tile of scores after another. 128 invocations as 16 x 8,
//           4 x 4 scores each; Q and K pass through shared memory 32 elements of head_dim at a time
// Push      params_base (words); chunk; query_base, key_base (vecs; of quantised rows quads); mask_base (words);
//           scores_base (vec4s)
// Bounds    keys outside the tile's visible range are not read, nor are rows beyond q_len. A tile that no row of it
//           sees by position is left unwritten: pass 2 and 3 do not read it. One closed by the mask is minus infinity
// Requires  nothing beyond Vulkan 1.1
// Source    the seed's first pass; blocking as in any GEMM
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x = 128) in;
layout(push_constant) uniform Push {
    uint params_base;
    uint chunk;
    uint query_base;
    uint key_base;
    uint mask_base;
    uint scores_base;
} push;

#include "query_out.glsl"
#include "key_format.glsl"

#include "params.glsl"
layout(set = 0, binding = 1) restrict readonly buffer Query { QUERY query[]; };
layout(set = 0, binding = 2) restrict readonly buffer Key { KEY key[]; };
layout(set = 0, binding = 3) restrict readonly buffer Mask { uint mask_data[]; };
layout(set = 0, binding = 4) coherent writeonly buffer Scores { vec4 scores[]; };
#include "read_query.glsl"
#include "key_rows.glsl"
#include "tiles.glsl"
#include "score.glsl"

const uint BLOCK_COLS = 64u;
const uint DEPTH = 8u;          // vecs of head_dim staged at a time
const uint PITCH = DEPTH + 1u;  // one vec of padding keeps 8 lanes that read 8 rows off each other's banks

shared vec4 q_tile[BLOCK_ROWS * PITCH];
shared vec4 k_tile[BLOCK_COLS * PITCH];  // key c lies at slot (c % 4) * 16 + c / 4: lane x reads slots x + 16 i
shared uint open_stamp;

vec4 load_query(bool live, uint at, uint d) {
    return live && d < head_vecs() ? read_query(at + d) : vec4(0.0);
}

vec4 load_key(bool live, uint at, uint d) {
    return live && d < head_vecs() ? read_key(at, d) : vec4(0.0);
}

// Whether the mask leaves anything of the tile open; the same answer in the whole workgroup.
bool tile_open(ScoreRule rule, ScoreRow rows[4], uint col, uint stamp) {
    if (rule.mask_kind == 0u) return true;
    bool open = false;
    for (uint i = 0u; i < 16u; ++i)
        if (attended(rule, rows[i / 4u], col + i % 4u)) open = true;
    if (open) open_stamp = stamp;
    barrier();
    bool result = open_stamp == stamp;
    barrier();
    return result;
}

// acc[i][c] = <q of row 4 y + i, k of column 4 x + c>, for the tile that starts at tile.first and col0.
vec4[4] dot_products(RowTile tile, uint col0, uint begin, uint end, uint x, uint y, bool busy) {
    uint lane = gl_LocalInvocationIndex, slot = lane / DEPTH, depth = lane % DEPTH;
    bool q_live[2], k_live[4];
    uint q_at[2], k_at[4], key0 = key_place(tile.b, tile.hk);
    [[unroll]] for (uint i = 0u; i < 2u; ++i) {
        uint row = tile.first + slot + 16u * i;
        q_live[i] = row < tile.rows;
        q_at[i] = push.query_base + tile.b * q_stride_batch() + row_head(tile, row) * q_stride_head()
                  + row_token(row) * q_stride_row();
    }
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        uint col = col0 + slot + 16u * i;
        k_live[i] = col >= begin && col < end;
        k_at[i] = key0 + col * key_step();
    }
    vec4 acc[4] = vec4[](vec4(0.0), vec4(0.0), vec4(0.0), vec4(0.0));
    for (uint d0 = 0u; d0 < head_vecs(); d0 += DEPTH) {
        barrier();
        [[unroll]] for (uint i = 0u; i < 2u; ++i)
            q_tile[(slot + 16u * i) * PITCH + depth] = load_query(q_live[i], q_at[i], d0 + depth);
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            uint c = slot + 16u * i;
            k_tile[((c % 4u) * 16u + c / 4u) * PITCH + depth] = load_key(k_live[i], k_at[i], d0 + depth);
        }
        barrier();
        if (busy) {
            for (uint d = 0u; d < DEPTH; ++d) {
                vec4 k0 = k_tile[x * PITCH + d], k1 = k_tile[(x + 16u) * PITCH + d];
                vec4 k2 = k_tile[(x + 32u) * PITCH + d], k3 = k_tile[(x + 48u) * PITCH + d];
                [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                    vec4 q = q_tile[(4u * y + i) * PITCH + d];
                    acc[i] += vec4(dot(q, k0), dot(q, k1), dot(q, k2), dot(q, k3));
                }
            }
        }
    }
    return acc;
}

void main() {
    uint x = gl_LocalInvocationIndex % 16u, y = gl_LocalInvocationIndex / 16u;
    uint first = min(push.chunk * tiles_per_chunk(), num_row_tiles());
    uint tiles = min(tiles_per_chunk(), num_row_tiles() - first);
    uint col_tiles = (max_kv_len() + BLOCK_COLS - 1u) / BLOCK_COLS;
    ScoreRule rule = score_rule();

    for (uint item = gl_WorkGroupID.x; item < tiles * col_tiles; item += gl_NumWorkGroups.x) {
        uint chunk_tile = item / col_tiles;
        RowTile tile = row_tile(first + chunk_tile);
        uint col0 = (item % col_tiles) * BLOCK_COLS, col = col0 + 4u * x;
        uint begin = tile_key_begin(tile), end = tile_key_end(tile);
        if (max(col0, begin) >= min(col0 + BLOCK_COLS, end)) continue;

        ScoreRow rows[4];
        [[unroll]] for (uint i = 0u; i < 4u; ++i) rows[i] = score_row(tile, tile.first + 4u * y + i);
        bool busy = tile.first + 4u * y < tile.rows;
        vec4 acc[4] = vec4[](vec4(0.0), vec4(0.0), vec4(0.0), vec4(0.0));
        if (tile_open(rule, rows, col, item + 1u)) acc = dot_products(tile, col0, begin, end, x, y, busy);

        uint at = push.scores_base + (chunk_tile * BLOCK_ROWS + 4u * y) * score_stride() + col / 4u;
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            vec4 s = acc[i] * rule.scale;
            if (!is_plain(rule, rows[i], col, col + 3u))
                s = vec4(masked_score(acc[i].x, rule, rows[i], col), masked_score(acc[i].y, rule, rows[i], col + 1u),
                         masked_score(acc[i].z, rule, rows[i], col + 2u),
                         masked_score(acc[i].w, rule, rows[i], col + 3u));
            if (tile.first + 4u * y + i < tile.rows) scores[at + i * score_stride()] = s;
        }
    }
}
