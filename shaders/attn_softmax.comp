// Purpose   pass 2 of the three-pass attention: softmax over the keys that each query row sees, in place
// Maths     m = max_j s_j;  l = sum_j e^(s_j - m) (+ e^(sink - m));  p_j = e^(s_j - m) / l;  lse = m + ln l
//           a row with nothing to attend gets p = 0 and lse = minus infinity (or the sink); one with a score that is
//           NaN or plus infinity gets lse = NaN
// Bindings  0 params  1 scores [row tile in chunk, 32, score_stride] float32 vec4s, read and written
//           2 lse [B, H, L] float32, rows padded to 4 with 0, written if FLAG_LSE is set
// Grid      any number of workgroups; each takes 4 rows at a time, 32 of its 128 invocations to a row
// Push      params_base (words); chunk; scores_base (vec4s); lse_base (words)
// Bounds    only vec4s with a key that the row sees are read and written; in those, other elements become 0
// Requires  nothing beyond Vulkan 1.1
// Source    online normaliser: Milakov and Gimelshein 2018; compensated sum: Kahan 1965
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 128) in;
layout(push_constant) uniform Push {
    uint params_base;
    uint chunk;
    uint scores_base;
    uint lse_base;
} push;

#include "params.glsl"
layout(set = 0, binding = 1) coherent buffer Scores { vec4 scores[]; };
layout(set = 0, binding = 2) coherent writeonly buffer Lse { float lse[]; };
#include "tiles.glsl"

const uint LANES = 32u;  // invocations to a row
const uint ROWS = 4u;    // rows of a workgroup
const uint MINUS_INFINITY = 0xFF800000u;
const uint NOT_A_NUMBER = 0x7FC00000u;
const float HIGHEST_SUM = 1.0e30;  // far beyond any number of keys: e^NaN may be infinity, and so may ln NaN
const float LOWEST = -3.4028235e38;  // row_max starts finite: a score of minus infinity less it is never NaN

shared vec2 part[LANES * ROWS];  // (row_max, row_sum) of each invocation

// e^(s - row_max), exactly 0 where s is minus infinity or the key is not in [begin, end).
vec4 weights(vec4 s, uint key, uint begin, uint end, float row_max) {
    uvec4 keys = uvec4(key, key + 1u, key + 2u, key + 3u);
    bvec4 alive = notEqual(floatBitsToUint(s), uvec4(MINUS_INFINITY));
    vec4 p = mix(vec4(0.0), exp(s - row_max), alive);
    p = mix(vec4(0.0), p, greaterThanEqual(keys, uvec4(begin)));
    return mix(vec4(0.0), p, lessThan(keys, uvec4(end)));
}

// The scores of four keys, minus infinity outside [begin, end).
vec4 seen(vec4 s, uint key, uint begin, uint end) {
    uvec4 keys = uvec4(key, key + 1u, key + 2u, key + 3u);
    vec4 minus_infinity = vec4(uintBitsToFloat(MINUS_INFINITY));
    s = mix(minus_infinity, s, greaterThanEqual(keys, uvec4(begin)));
    return mix(minus_infinity, s, lessThan(keys, uvec4(end)));
}

vec2 merged(vec2 a, vec2 b) {
    float row_max = max(a.x, b.x);
    return vec2(row_max, a.y * exp(a.x - row_max) + b.y * exp(b.x - row_max));
}

void main() {
    uint lane = gl_LocalInvocationIndex % LANES, slot = gl_LocalInvocationIndex / LANES;
    uint first = min(push.chunk * tiles_per_chunk(), num_row_tiles());
    uint tiles = min(tiles_per_chunk(), num_row_tiles() - first);
    uint groups = tiles * (BLOCK_ROWS / ROWS);

    for (uint group = gl_WorkGroupID.x; group < groups; group += gl_NumWorkGroups.x) {
        uint score_row = group * ROWS + slot;
        RowTile tile = row_tile(first + score_row / BLOCK_ROWS);
        uint row = tile.first + score_row % BLOCK_ROWS;
        if (row - slot >= tile.rows) continue;  // none of the 4 rows exists
        bool live = row < tile.rows;
        uint token = row_token(min(row, tile.rows - 1u));
        uvec2 range = live ? key_range(tile.b, token) : uvec2(0u);
        uint begin = range.x, end = range.y;
        uint base = push.scores_base + score_row * score_stride();

        float row_max = LOWEST;
        precise float row_sum = 0.0;
        precise float lost = 0.0;  // what row_sum has lost to rounding
        for (uint i = begin / 4u + lane; i * 4u < end; i += LANES) {
            vec4 s = seen(scores[base + i], 4u * i, begin, end);
            float new_max = max(row_max, max(max(s.x, s.y), max(s.z, s.w)));
            vec4 p = weights(s, 4u * i, begin, end, new_max);
            float shrink = exp(row_max - new_max);
            precise float term = (p.x + p.y) + (p.z + p.w) - lost * shrink;
            precise float old_sum = row_sum * shrink;
            row_sum = old_sum + term;
            lost = (row_sum - old_sum) - term;
            row_max = new_max;
        }
        part[gl_LocalInvocationIndex] = vec2(row_max, row_sum);
        for (uint step = LANES / 2u; step > 0u; step /= 2u) {
            barrier();
            if (lane < step)
                part[gl_LocalInvocationIndex] =
                    merged(part[gl_LocalInvocationIndex], part[gl_LocalInvocationIndex + step]);
        }
        barrier();
        vec2 whole = part[slot * LANES];
        barrier();

        uint h = row_head(tile, row);
        if (live && (flags() & FLAG_SINKS) != 0u) whole = merged(whole, vec2(sink(h), 1.0));
        bool empty = whole.y == 0.0;  // false for NaN, which then reaches the row and its lse
        float inverse = empty ? 0.0 : 1.0 / whole.y;
        for (uint i = begin / 4u + lane; i * 4u < end; i += LANES)
            scores[base + i] = weights(scores[base + i], 4u * i, begin, end, whole.x) * inverse;
        if (live && lane == 0u && (flags() & FLAG_LSE) != 0u) {
            uint lse_row = (q_len() + 3u) & ~3u;
            uint index = push.lse_base + (tile.b * num_kv_heads() * group_size() + h) * lse_row + token;
            float finite_lse = whole.y < HIGHEST_SUM ? whole.x + log(whole.y) : uintBitsToFloat(NOT_A_NUMBER);
            lse[index] = empty ? uintBitsToFloat(MINUS_INFINITY) : finite_lse;
            for (uint pad = token + 1u; token + 1u == q_len() && pad < lse_row; ++pad) lse[index + pad - token] = 0.0;
        }
    }
}
