// Purpose   pass 3 of the three-pass attention: the output rows of one chunk, from their weights
// Maths     out[r, e] = sum_j p[r, j] v[j, e], over the keys that row r sees and whose weight is not 0
// Bindings  0 params  1 probs [row tile in chunk, 32, score_stride] float32 vec4s  2 value [B, Hkv, S, Ev]
//           3 out [B, H, L, Ev]. Strides are in params. Values of any format (vkattn/formats.py)
// Grid      any number of workgroups; each takes one tile of 32 rows x 64 elements of value_dim after another.
//           128 invocations as 16 x 8, 4 rows x 1 vec each; 32 keys pass through shared memory at a time
// Push      params_base (words); chunk; probs_base (vec4s); value_base, out_base (vecs; of quantised rows quads)
// Bounds    vec4s of weights without a key that the row sees count as 0 and are not read (in the others, pass 2 has
//           written 0 outside the row's range); values outside the tile's range, or under weights that are all 0
//           because of the mask, are not read. A weight of 0 never multiplies a value that is not finite. Padding of
//           the output's rows is written 0 (NaN in a row whose weights are not finite)
// Requires  nothing beyond Vulkan 1.1
// Source    the seed's third pass; compensated sum over the blocks of keys: Kahan 1965
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x = 128) in;
layout(push_constant) uniform Push {
    uint params_base;
    uint chunk;
    uint probs_base;
    uint value_base;
    uint out_base;
} push;

#if defined(VALUE_F32)
#define KEY_F32
#elif defined(VALUE_F16)
#define KEY_F16
#elif defined(VALUE_BF16)
#define KEY_BF16
#elif defined(VALUE_INT8)
#define KEY_INT8
#elif defined(VALUE_Q8_0)
#define KEY_Q8_0
#elif defined(VALUE_Q4_0)
#define KEY_Q4_0
#else
#define KEY_MIXED
#endif
#if defined(OUT_F32)
#define QUERY_F32
#elif defined(OUT_F16)
#define QUERY_F16
#elif defined(OUT_BF16)
#define QUERY_BF16
#else
#define QUERY_ANY
#endif
#include "key_format.glsl"
#include "query_out.glsl"

#include "params.glsl"
layout(set = 0, binding = 1) restrict readonly buffer Probs { vec4 probs[]; };
layout(set = 0, binding = 2) restrict readonly buffer Value { KEY value[]; };
layout(set = 0, binding = 3) coherent writeonly buffer Out { QUERY outputs[]; };
#include "value_rows.glsl"
#include "write_out.glsl"
#include "tiles.glsl"

const uint BLOCK_KEYS = 32u;
const uint BLOCK_VECS = 16u;             // vecs of value_dim in a tile
const uint PITCH = BLOCK_KEYS / 4u + 1u;  // one vec4 of padding keeps rows off each other's banks

shared vec4 p_tile[BLOCK_ROWS * PITCH];
shared vec4 v_tile[BLOCK_KEYS * BLOCK_VECS];
shared uint open_stamp;   // the block of keys, plus 1, that has a weight other than 0
shared uint dirty_stamp;  // the block of keys, plus 1, that has a value which is not finite

// Where the weights of one row lie and which keys it sees; an empty range for a row that does not exist.
struct ProbRow {
    uint begin, end;
    uint at;
};

ProbRow prob_row(RowTile tile, uint row, uint score_row) {
    if (row >= tile.rows) return ProbRow(0u, 0u, 0u);
    uvec2 range = key_range(tile.b, row_token(row));
    return ProbRow(range.x, range.y, push.probs_base + score_row * score_stride());
}

vec4 load_probs(ProbRow row, uint key) {
    return key < row.end && key + 4u > row.begin ? probs[row.at + key / 4u] : vec4(0.0);
}

// The staged block's part of four rows' outputs. Both forms round alike, so that the result does not depend on whether
// something that nobody attends is finite.
vec4[4] product(uint x, uint y) {
    vec4 sum[4] = vec4[](vec4(0.0), vec4(0.0), vec4(0.0), vec4(0.0));
    for (uint j = 0u; j < BLOCK_KEYS / 4u; ++j) {
        vec4 v0 = v_tile[(4u * j) * BLOCK_VECS + x], v1 = v_tile[(4u * j + 1u) * BLOCK_VECS + x];
        vec4 v2 = v_tile[(4u * j + 2u) * BLOCK_VECS + x], v3 = v_tile[(4u * j + 3u) * BLOCK_VECS + x];
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            vec4 p = p_tile[(4u * y + i) * PITCH + j];
            sum[i] = fma(vec4(p.x), v0, sum[i]);
            sum[i] = fma(vec4(p.y), v1, sum[i]);
            sum[i] = fma(vec4(p.z), v2, sum[i]);
            sum[i] = fma(vec4(p.w), v3, sum[i]);
        }
    }
    return sum;
}

// The same where a value is not finite (rare): a weight of 0 must not meet it.
vec4[4] product_selected(uint x, uint y) {
    vec4 sum[4] = vec4[](vec4(0.0), vec4(0.0), vec4(0.0), vec4(0.0));
    for (uint j = 0u; j < BLOCK_KEYS; ++j) {
        vec4 v = v_tile[j * BLOCK_VECS + x];
        for (uint i = 0u; i < 4u; ++i) {
            float p = p_tile[(4u * y + i) * PITCH + j / 4u][j % 4u];
            if (p != 0.0) sum[i] = fma(vec4(p), v, sum[i]);
        }
    }
    return sum;
}

void main() {
    uint lane = gl_LocalInvocationIndex;
    uint x = lane % BLOCK_VECS, y = lane / BLOCK_VECS;
    uint first = min(push.chunk * tiles_per_chunk(), num_row_tiles());
    uint tiles = min(tiles_per_chunk(), num_row_tiles() - first);
    uint vec_tiles = (out_vecs() + BLOCK_VECS - 1u) / BLOCK_VECS;
    bool has_mask = (flags() & (FLAG_MASK_BITS | FLAG_MASK_FLOAT)) != 0u;

    for (uint item = gl_WorkGroupID.x; item < tiles * vec_tiles; item += gl_NumWorkGroups.x) {
        RowTile tile = row_tile(first + item / vec_tiles);
        uint score_row = (item / vec_tiles) * BLOCK_ROWS;
        uint e = (item % vec_tiles) * BLOCK_VECS + x;
        uint begin = tile_key_begin(tile), end = tile_key_end(tile);
        bool busy = tile.first + 4u * y < tile.rows;
        uint slot = lane / 8u, quarter = lane % 8u;
        ProbRow rows[2];
        [[unroll]] for (uint i = 0u; i < 2u; ++i)
            rows[i] = prob_row(tile, tile.first + slot + 16u * i, score_row + slot + 16u * i);
        bool in_row = e < value_vecs();
        uint value_at = value_place(tile.b, tile.hk), value_row = value_step();

        precise vec4 acc[4] = vec4[](vec4(0.0), vec4(0.0), vec4(0.0), vec4(0.0));
        precise vec4 lost[4] = vec4[](vec4(0.0), vec4(0.0), vec4(0.0), vec4(0.0));
        for (uint j0 = begin & ~3u; j0 < end; j0 += BLOCK_KEYS) {
            barrier();
            bool open = false;
            [[unroll]] for (uint i = 0u; i < 2u; ++i) {
                vec4 p = load_probs(rows[i], j0 + 4u * quarter);
                p_tile[(slot + 16u * i) * PITCH + quarter] = p;
                if (p != vec4(0.0)) open = true;
            }
            if (has_mask) {
                if (open) open_stamp = j0 + 1u;
                barrier();
                if (open_stamp != j0 + 1u) continue;
            }
            bool finite = true;
            [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                uint key = j0 + y + 8u * i;
                bool seen = key >= begin && key < end && in_row;
                vec4 v = seen ? read_value(value_at + key * value_row, e) : vec4(0.0);
                v_tile[(y + 8u * i) * BLOCK_VECS + x] = v;
                if (any(equal(floatBitsToUint(v) & 0x7F800000u, uvec4(0x7F800000u)))) finite = false;
            }
            if (!finite) dirty_stamp = j0 + 1u;
            barrier();
            if (busy) {
                vec4 sum[4];
                if (dirty_stamp == j0 + 1u) sum = product_selected(x, y);
                else sum = product(x, y);
                [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                    precise vec4 term = sum[i] - lost[i];
                    precise vec4 next = acc[i] + term;
                    precise vec4 rounded = (next - acc[i]) - term;
                    lost[i] = mix(vec4(0.0), rounded, lessThan(abs(next), vec4(3.4e38)));  // no NaN from infinities
                    acc[i] = next;
                }
            }
        }
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            uint row = tile.first + 4u * y + i;
            if (row < tile.rows && e < out_vecs())
                write_output(push.out_base + tile.b * out_stride_batch() + row_head(tile, row) * out_stride_head()
                             + row_token(row) * out_stride_row() + e, acc[i]);
        }
    }
}
