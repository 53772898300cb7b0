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
layout(constant_id = 1) const uint USED_ROWS = 4u;
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
#else
#define WIDTH 128
#endif
#ifndef TILES
#define TILES 1
#endif
#define TILE_KEYS (16u * TILES)

#if defined(KEY_Q4_0)
#define KEY_UNIT uint
#define UNIT_BYTES 4u
#define BLOCK_WORDS 4u
#else
#define KEY_UNIT uvec2
#define UNIT_BYTES 8u
#define BLOCK_WORDS 8u
#endif
#if !defined(KEY_INT8)
#define BLOCKS (WIDTH / 32)
#endif
#if defined(KEY_INT8) && WIDTH == 128
#define VALUE_QUADS
#endif

#include "params.glsl"
layout(set = 0, binding = 1) restrict readonly buffer Query { QUERY query[]; };
layout(set = 0, binding = 2) restrict readonly buffer Key { uvec4 key[]; };
layout(set = 0, binding = 2) restrict readonly buffer KeyUnits { KEY_UNIT key_units[]; };
layout(set = 0, binding = 2) restrict readonly buffer KeyScales { uvec2 key_scales[]; };
layout(set = 0, binding = 3) restrict readonly buffer Value { uvec4 value[]; };
layout(set = 0, binding = 3) restrict readonly buffer ValueWords { uint value_words[]; };
layout(set = 0, binding = 3) restrict readonly buffer ValueScales { uvec2 value_scales[]; };
layout(set = 0, binding = 4) restrict readonly buffer Mask { uint mask_data[]; };
layout(set = 0, binding = 5) coherent buffer Parts { vec4 parts[]; };
layout(set = 0, binding = 6) coherent buffer Tickets { uint tickets[]; };
layout(set = 0, binding = 7) coherent writeonly buffer Out { QUERY outputs[]; };
layout(set = 0, binding = 8) coherent writeonly buffer Lse { float lse[]; };
#include "read_query.glsl"
#include "tiles.glsl"
#include "score.glsl"
shared vec4 sums[THREADS * 4];
#define WAY_SUMS sums
#include "split.glsl"
#include "matrix_units.glsl"
shared vec2 group_state[THREADS / 32u * ROWS];

#define CHUNKS (WIDTH / 64)       // pieces of 16 codes of a key row in an invocation
#define STEPS (WIDTH / 16)        // matrices across head_dim
#define MAGIC 0x64006400u         // two halves of 1024

// A head's rows: codes in quads, scales in words.
struct Source {
    uint codes_at, row_quads, live, scales_at, row_scales;
};
Source source_of(uint start, uint head_quads, uint batch_quads, uint row_quads, uint vecs) {
    Source source;
    source.codes_at = start + head_quads;
    source.row_quads = row_quads;
#if defined(BLOCKS)
    source.live = (vecs + 7u) / 8u;
    source.row_scales = (vecs + 15u) / 16u;
#else
    source.live = row_quads;
    source.row_scales = 2u;
#endif
    source.scales_at = 4u * (start + batch_size() * batch_quads) + head_quads / row_quads * source.row_scales;
    return source;
}

#if defined(BLOCKS)
struct KeyCodes { KEY_UNIT unit[TILES * 2 * BLOCKS]; uvec2 scale[TILES * 2]; };
struct ValueCodes { uint word[TILES * 4 * BLOCKS]; uvec2 scale[TILES * 4]; };
#elif defined(VALUE_QUADS)
struct KeyCodes { uvec4 quad[TILES * 2 * CHUNKS]; uvec2 scale[TILES * 2]; };
struct ValueCodes { uvec4 quad[TILES * 4]; uvec2 scale[TILES * 2]; };
#else
struct KeyCodes { uvec4 quad[TILES * 2 * CHUNKS]; uvec2 scale[TILES * 2]; };
struct ValueCodes { uint word[TILES * 4 * (WIDTH / 32)]; uvec2 scale[TILES * 2]; };
#endif

uint g() { return LANE / 4u; }
uint t() { return LANE % 4u; }

// The scales of a row: both words of int8; of blocks two words of which there may be only the first.
uvec2 row_scales(uvec2 pair, uint word) { return uvec2((word & 1u) != 0u ? pair.y : pair.x, pair.y); }
#define SCALES(pairs, j) row_scales(pairs[source.scales_at + (j) * source.row_scales >> 1], \
                                    source.scales_at + (j) * source.row_scales)

KeyCodes load_keys(Source source, uint j0, uint end) {
    KeyCodes codes;
    UNROLL for (uint h = 0u; h < 2u * TILES; ++h) {
        uint j = min(j0 + 8u * h + g(), end - 1u);
#if defined(BLOCKS)
        UNROLL for (uint b = 0u; b < BLOCKS; ++b)
            codes.unit[h * BLOCKS + b] = key_units[(source.codes_at + j * source.row_quads) * (16u / UNIT_BYTES)
                                                   + 4u * min(b, source.live - 1u) + t()];
#else
        UNROLL for (uint c = 0u; c < CHUNKS; ++c)
            codes.quad[h * CHUNKS + c] = key[source.codes_at + j * source.row_quads
                                             + min(4u * c + t(), source.live - 1u)];
#endif
        codes.scale[h] = SCALES(key_scales, j);
    }
    return codes;
}
// Pairs of keys 8 apart: 2 t and 2 t + 1.
ValueCodes load_values(Source source, uint j0, uint end) {
    ValueCodes codes;
    UNROLL for (uint n = 0u; n < TILES; ++n) {
        UNROLL for (uint i = 0u; i < 4u; ++i) {
            uint j = min(j0 + 16u * n + 2u * t() + i / 2u + 8u * (i % 2u), end - 1u);
#if defined(VALUE_QUADS)
            codes.quad[n * 4u + i] = value[source.codes_at + j * source.row_quads + min(g(), source.live - 1u)];
#elif defined(BLOCKS)
            UNROLL for (uint b = 0u; b < BLOCKS; ++b)
                codes.word[(n * 4u + i) * BLOCKS + b] = value_words[4u * (source.codes_at + j * source.row_quads)
                    + BLOCK_WORDS * min(b, source.live - 1u) + g() * BLOCK_WORDS / 8u];
            codes.scale[n * 4u + i] = SCALES(value_scales, j);
#else
            UNROLL for (uint b = 0u; b < WIDTH / 32u; ++b)
                codes.word[(n * 4u + i) * (WIDTH / 32u) + b] = value_words[4u * (source.codes_at + j * source.row_quads)
                    + min(8u * b + g(), 4u * source.live - 1u)];
#endif
        }
#if !defined(BLOCKS)
        UNROLL for (uint h = 0u; h < 2u; ++h)
            codes.scale[2u * n + h] = SCALES(value_scales, min(j0 + 16u * n + 8u * h + g(), end - 1u));
#endif
    }
    return codes;
}

#define PUT(m, at, pair)          \
    {                             \
        HALF2 both = pair;      \
        PART(m, at) = both.x;     \
        PART(m, at + 1) = both.y; \
    }

uint magic() { return MAGIC | flags() >> 31; }  // hidden: with a constant beside the mask it takes two operations
#if defined(NO_UNPACK)
HALF2 codes_of(uint bits, HALF2 bias, uint magic_bits) { return halves(bits); }
#else
HALF2 codes_of(uint bits, HALF2 bias, uint magic_bits) {
    return halves(bits & 0x00FF00FFu | magic_bits) - bias;
}
#endif

#if defined(KEY_Q4_0)
// Codes less 8: those in bits 0 .. 3 of both halves (upper = 0), or in bits 4 .. 7.
HALF2 nibbles_of(uint bits, uint mask, HALF factor, HALF bias, uint magic_bits) {
#if defined(NO_UNPACK)
    return halves(bits);
#else
    return fma(halves(bits & mask | magic_bits), HALF2(factor), HALF2(-bias));
#endif
}
#define LOW_NIBBLES(bits) nibbles_of(bits, 0x000F000Fu, HALF(1.0), HALF(1032.0), magic_bits)
#define HIGH_NIBBLES(bits) nibbles_of(bits, 0x00F000F0u, HALF(0.0625), HALF(72.0), magic_bits)
#endif

// Two halves (1024 + 128 + zero point) of a row.
uint bias_bits(uint zero_point) { return 0x6400u + (zero_point + 128u & 0xFFu); }

#if defined(VALUE_QUADS)
#define VALUE_WORD(n, i, b) v.quad[4u * (n) + (i)][b]
#else
#define VALUE_WORD(n, i, b) v.word[(4u * (n) + (i)) * (WIDTH / 32u) + (b)]
#endif
#if defined(PACKED)
#define LOWER(a, b) half_words(HALF2(halves(a).x, halves(b).x))
#define UPPER(a, b) half_words(HALF2(halves(a).y, halves(b).y))
#else
#define LOWER(a, b) ((a) & 0xFFFFu | (b) << 16)
#define UPPER(a, b) ((a) >> 16 | (b) & 0xFFFF0000u)
#endif
// Bytes 0 and 1 of both keys of a pair, and bytes 2 and 3.
#define PAIRS(b)                                                                            \
    uint x[2], y[2];                                                                        \
    UNROLL for (uint u = 0u; u < 2u; ++u) {                                             \
        x[u] = LOWER(VALUE_WORD(n, 2u * u, b), VALUE_WORD(n, 2u * u + 1u, b));              \
        y[u] = UPPER(VALUE_WORD(n, 2u * u, b), VALUE_WORD(n, 2u * u + 1u, b));              \
    }
#if defined(KEY_Q4_0)  // neighbours have the same word, the even one the lower four bits
#define VALUE_CODES(bits) nibbles_of(bits, own_mask, own_factor, own_bias, magic_bits)
#else
#define VALUE_CODES(bits) codes_of(bits, HALF2(1152.0), magic_bits)
#endif

// The leading bits of numbers as halves in even columns g, what they leave in odd ones.
HALF2 own_part(vec2 x) {
    HALF2 high = rounded(x);
    vec2 rest = mix(x - vec2(high), vec2(0.0), isinf(vec2(high)));
    return (g() & 1u) == 0u ? high : rounded(rest);
}

struct State {
    float row_max, row_sum;  // row_sum: of this invocation's keys
    float limit, norm;       // weights are at most limit, and multiplied by norm
};

void attend(RowTile tile, uint begin, uint end, inout State state, inout SUMS acc[STEPS]) {
    ScoreRule rule = score_rule();
    ScoreRow row = score_row(tile, tile.first + t());
    bool plain = tile.first + t() >= tile.rows || is_plain(rule, row, begin, end - 1u);
    // The queries of row g / 2 as columns g: their leading bits, or the rest.
    RIGHT q[STEPS];
    float norm;
    {
        uint r = tile.first + g() / 2u;
        vec4 x[STEPS];
        float largest = 0.0;
        UNROLL for (uint i = 0u; i < STEPS; ++i) {
#if defined(BLOCKS)
            uint d = 8u * (i / 2u) + 2u * t() + i % 2u;
#else
            uint d = 16u * (i / 4u) + 4u * t() + i % 4u;
#endif
            x[i] = vec4(0.0);
            if (r < tile.rows && d < head_vecs())
                x[i] = read_query(push.query_base + tile.b * q_stride_batch() + row_head(tile, r) * q_stride_head()
                                  + row_token(r) * q_stride_row() + d);
            vec4 size = abs(x[i]);
            largest = max(largest, max(max(size.x, size.y), max(size.z, size.w)));
        }
        largest = max(largest, shuffle_float(largest, LANE ^ 1u));
        largest = max(largest, shuffle_float(largest, LANE ^ 2u));
        uint exponent = clamp(floatBitsToUint(largest) >> 23, 20u, 254u);
        float factor = uintBitsToFloat(min(267u - exponent, 254u) << 23);  // the largest is in [2^13, 2^14)
        UNROLL for (uint i = 0u; i < STEPS; ++i) {
            vec4 y = x[i] * factor;
            PUT(q[i], 0, own_part(y.xz))
            PUT(q[i], 2, own_part(y.yw))
        }
        norm = shuffle_float(1.0 / factor, 8u * t());
    }
    Source k_source = source_of(push.key_base + key_offset(), tile.b * k_stride_batch() + tile.hk * k_stride_head(),
                                k_stride_batch(), k_stride_row(), head_vecs());
    Source v_source = source_of(push.value_base + value_offset(),
                                tile.b * v_stride_batch() + tile.hk * v_stride_head(), v_stride_batch(),
                                v_stride_row(), value_vecs());
    uint magic_bits = magic(), step = SUBGROUPS * TILE_KEYS, j0 = begin + SUBGROUP * TILE_KEYS;
#if defined(KEY_Q4_0)
    bool upper = (g() & 1u) != 0u;
    uint own_mask = upper ? 0x00F000F0u : 0x000F000Fu;
    HALF own_factor = upper ? HALF(0.0625) : HALF(1.0);
    HALF own_bias = upper ? HALF(72.0) : HALF(1032.0);
#endif
    KeyCodes k = load_keys(k_source, j0, end);
    ValueCodes v = load_values(v_source, j0, end);
    for (; j0 < end; j0 += step) {
        float s[2 * TILES];
#if defined(BLOCKS)
        UNROLL for (uint n = 0u; n < TILES; ++n) {
            s[2u * n] = 0.0;
            s[2u * n + 1u] = 0.0;
            UNROLL for (uint b = 0u; b < BLOCKS; ++b) {
                KEY_UNIT low = k.unit[2u * n * BLOCKS + b], high = k.unit[(2u * n + 1u) * BLOCKS + b];
                SUMS dots = no_sums();
                LEFT a, c;
#if defined(KEY_Q4_0)
                PUT(a, 0, LOW_NIBBLES(low))
                PUT(a, 2, LOW_NIBBLES(low >> 8))
                PUT(a, 4, LOW_NIBBLES(high))
                PUT(a, 6, LOW_NIBBLES(high >> 8))
                PUT(c, 0, HIGH_NIBBLES(low))
                PUT(c, 2, HIGH_NIBBLES(low >> 8))
                PUT(c, 4, HIGH_NIBBLES(high))
                PUT(c, 6, HIGH_NIBBLES(high >> 8))
#else
                HALF2 bias = HALF2(1152.0);
                PUT(a, 0, codes_of(low.x, bias, magic_bits))
                PUT(a, 2, codes_of(low.x >> 8, bias, magic_bits))
                PUT(a, 4, codes_of(high.x, bias, magic_bits))
                PUT(a, 6, codes_of(high.x >> 8, bias, magic_bits))
                PUT(c, 0, codes_of(low.y, bias, magic_bits))
                PUT(c, 2, codes_of(low.y >> 8, bias, magic_bits))
                PUT(c, 4, codes_of(high.y, bias, magic_bits))
                PUT(c, 6, codes_of(high.y >> 8, bias, magic_bits))
#endif
                dots = multiply_add(c, q[2u * b + 1u], multiply_add(a, q[2u * b], dots));
                if (b < k_source.live) {
                    vec2 both = vec2(PART(dots, 0) + PART(dots, 1), PART(dots, 2) + PART(dots, 3));
                    s[2u * n] = fma(both.x, unpackHalf2x16(k.scale[2u * n][b / 2u])[b % 2u], s[2u * n]);
                    s[2u * n + 1u] = fma(both.y, unpackHalf2x16(k.scale[2u * n + 1u][b / 2u])[b % 2u], s[2u * n + 1u]);
                }
            }
            s[2u * n] *= norm;
            s[2u * n + 1u] *= norm;
        }
#else
        UNROLL for (uint n = 0u; n < TILES; ++n) {
            HALF2 low_bias = halves(bias_bits(k.scale[2u * n].y) * 0x10001u);
            HALF2 high_bias = halves(bias_bits(k.scale[2u * n + 1u].y) * 0x10001u);
            SUMS dots = no_sums();
            UNROLL for (uint i = 0u; i < STEPS; ++i) {
                uint low = k.quad[2u * n * CHUNKS + i / 4u][i % 4u];
                uint high = k.quad[(2u * n + 1u) * CHUNKS + i / 4u][i % 4u];
                LEFT a;
                PUT(a, 0, codes_of(low, low_bias, magic_bits))
                PUT(a, 2, codes_of(low >> 8, low_bias, magic_bits))
                PUT(a, 4, codes_of(high, high_bias, magic_bits))
                PUT(a, 6, codes_of(high >> 8, high_bias, magic_bits))
                dots = multiply_add(a, q[i], dots);
            }
            s[2u * n] = (PART(dots, 0) + PART(dots, 1)) * norm * uintBitsToFloat(k.scale[2u * n].x);
            s[2u * n + 1u] = (PART(dots, 2) + PART(dots, 3)) * norm * uintBitsToFloat(k.scale[2u * n + 1u].x);
        }
#endif
#if !defined(NO_LOADS)
        k = load_keys(k_source, j0 + step, end);
#endif

        float p[2 * TILES], w[2 * TILES];
#if defined(BLOCKS)
        bool moves = false;
        UNROLL for (uint h = 0u; h < 2u * TILES; ++h) {
            uint j = j0 + 8u * h + g();
            float x = uintBitsToFloat(MINUS_INFINITY);
            if (j < end) x = plain ? s[h] * rule.scale : masked_score(s[h], rule, row, j);
            s[h] = x;
            moves = moves || x > state.row_max;
        }
        moves = any_of(moves);
        if (moves) {
            float new_max = state.row_max;
            UNROLL for (uint h = 0u; h < 2u * TILES; ++h) new_max = max(new_max, s[h]);
            UNROLL for (uint step = 4u; step < 32u; step *= 2u)
                new_max = max(new_max, shuffle_float(new_max, LANE ^ step));
            float shrink = exp(state.row_max - new_max);
            state.row_max = new_max;
            state.row_sum *= shrink;
            UNROLL for (uint i = 0u; i < STEPS; ++i)
                UNROLL for (uint c = 0u; c < 4u; ++c) PART(acc[i], c) *= shrink;
        }
        UNROLL for (uint h = 0u; h < 2u * TILES; ++h) {
            p[h] = floatBitsToUint(s[h]) == MINUS_INFINITY ? 0.0 : exp(s[h] - state.row_max);
            state.row_sum += p[h];
        }
#elif defined(NO_SOFTMAX)
        UNROLL for (uint h = 0u; h < 2u * TILES; ++h) {
            p[h] = s[h];
            state.row_sum += p[h];
            w[h] = p[h] * uintBitsToFloat(v.scale[h].x);
        }
#else
        bool moves = false;
        UNROLL for (uint h = 0u; h < 2u * TILES; ++h) {
            uint j = j0 + 8u * h + g();
            float x = uintBitsToFloat(MINUS_INFINITY);
            if (j < end) x = plain ? s[h] * rule.scale : masked_score(s[h], rule, row, j);
            s[h] = x;
            p[h] = floatBitsToUint(x) == MINUS_INFINITY ? 0.0 : exp(x - state.row_max);
            w[h] = p[h] == 0.0 ? 0.0 : p[h] * uintBitsToFloat(v.scale[h].x);  // a weight of 0 must not meet a NaN
            moves = moves || x > state.row_max || abs(w[h]) > state.limit;
        }
        if (any_of(moves)) {
            float new_max = state.row_max, most = 0.0;
            UNROLL for (uint h = 0u; h < 2u * TILES; ++h) new_max = max(new_max, s[h]);
            UNROLL for (uint step = 4u; step < 32u; step *= 2u)
                new_max = max(new_max, shuffle_float(new_max, LANE ^ step));
            UNROLL for (uint h = 0u; h < 2u * TILES; ++h) {
                p[h] = floatBitsToUint(s[h]) == MINUS_INFINITY ? 0.0 : exp(s[h] - new_max);
                w[h] = p[h] == 0.0 ? 0.0 : p[h] * uintBitsToFloat(v.scale[h].x);
                most = max(most, abs(w[h]));
            }
            UNROLL for (uint step = 4u; step < 32u; step *= 2u) most = max(most, shuffle_float(most, LANE ^ step));
            float shrink = exp(state.row_max - new_max), new_norm = state.norm;
            state.row_max = new_max;
            state.row_sum *= shrink;
            if (most > 0.0 && most < 1.0e38) {  // the largest weight becomes [2^11, 2^12), the limit is 2^15
                uint exponent = clamp(floatBitsToUint(most) >> 23, 14u, 250u);
                new_norm = uintBitsToFloat(min(265u - exponent, 254u) << 23);
                state.limit = 32768.0 / new_norm;
            }
            shrink *= new_norm / state.norm;
            state.norm = new_norm;
            UNROLL for (uint i = 0u; i < STEPS; ++i)
                UNROLL for (uint c = 0u; c < 4u; ++c) PART(acc[i], c) *= shrink;
        }
        UNROLL for (uint h = 0u; h < 2u * TILES; ++h) {
            state.row_sum += p[h];
            w[h] *= state.norm;
        }
#endif

#if defined(BLOCKS)
        UNROLL for (uint n = 0u; n < TILES; ++n) {
            uint from = 8u * t() + g() / 2u;
            float u[4], w[4 * BLOCKS], total = 0.0;
            UNROLL for (uint i = 0u; i < 4u; ++i) u[i] = shuffle_float(p[2u * n + i % 2u], from + 4u * (i / 2u));
            UNROLL for (uint b = 0u; b < BLOCKS; ++b)
                UNROLL for (uint i = 0u; i < 4u; ++i) {
                    if (b >= v_source.live) continue;
                    w[4u * b + i] = u[i] * state.norm * unpackHalf2x16(v.scale[4u * n + i][b / 2u])[b % 2u];
                    total += abs(w[4u * b + i]);
                }
            if (any_of(moves || !(total <= state.limit))) {
                float most = 0.0;
                UNROLL for (uint b = 0u; b < BLOCKS; ++b)
                    UNROLL for (uint i = 0u; i < 4u; ++i) {
                        if (b >= v_source.live) continue;
                        w[4u * b + i] = u[i] == 0.0 ? 0.0 : u[i] * unpackHalf2x16(v.scale[4u * n + i][b / 2u])[b % 2u];
                        most = max(most, abs(w[4u * b + i]));
                    }
                UNROLL for (uint step = 1u; step < 8u; step *= 2u) most = max(most, shuffle_float(most, LANE ^ step));
                float new_norm = state.norm;
                if (most > 0.0 && most < 1.0e38) {  // the largest weight becomes [2^11, 2^12), the limit is 2^15
                    uint exponent = clamp(floatBitsToUint(most) >> 23, 14u, 250u);
                    new_norm = uintBitsToFloat(min(265u - exponent, 254u) << 23);
                }
                float shrink = shuffle_float(new_norm / state.norm, 8u * t());
                state.norm = new_norm;
                state.limit = 32768.0;
                UNROLL for (uint i = 0u; i < STEPS; ++i)
                    UNROLL for (uint c = 0u; c < 4u; ++c) PART(acc[i], c) *= shrink;
                UNROLL for (uint i = 0u; i < 4u * BLOCKS; ++i) w[i] *= state.norm;
            }
#if !defined(NO_V)
            UNROLL for (uint b = 0u; b < BLOCKS; ++b) {
                if (b >= v_source.live) continue;
                RIGHT weights;
                UNROLL for (uint i = 0u; i < 2u; ++i) {
                    vec2 whole = vec2(w[4u * b + 2u * i], w[4u * b + 2u * i + 1u]);
                    HALF2 high = rounded(whole), rest = rounded(whole - vec2(high));
                    PUT(weights, 2 * i, (g() & 1u) == 0u ? high : rest)
                }
                PAIRS(b)
                LEFT a, c;
                PUT(a, 0, VALUE_CODES(x[0]))
                PUT(a, 2, VALUE_CODES(x[1]))
                PUT(a, 4, VALUE_CODES(x[0] >> 8))
                PUT(a, 6, VALUE_CODES(x[1] >> 8))
                acc[2u * b] = multiply_add(a, weights, acc[2u * b]);
                PUT(c, 0, VALUE_CODES(y[0]))
                PUT(c, 2, VALUE_CODES(y[1]))
                PUT(c, 4, VALUE_CODES(y[0] >> 8))
                PUT(c, 6, VALUE_CODES(y[1] >> 8))
                acc[2u * b + 1u] = multiply_add(c, weights, acc[2u * b + 1u]);
            }
#else
            acc[0] = multiply_add(LEFT(HALF(1.0)), RIGHT(HALF(w[0] + w[1] + w[2] + w[3] + w[4] + w[8] + w[12])), acc[0]);
#endif
        }
#else
        UNROLL for (uint n = 0u; n < TILES; ++n) {
            HALF2 high = rounded(vec2(w[2u * n], w[2u * n + 1u]));
            HALF2 rest = rounded(vec2(w[2u * n], w[2u * n + 1u]) - vec2(high));
            uint high_bits = half_words(high), rest_bits = half_words(rest);
            uint bias = bias_bits(v.scale[2u * n].y) | bias_bits(v.scale[2u * n + 1u].y) << 16;
            uint from = 8u * t() + g() / 2u;
            RIGHT weights;
            HALF2 biases[2];
            UNROLL for (uint i = 0u; i < 2u; ++i) {
                uint a = shuffle(high_bits, from + 4u * i), b = shuffle(rest_bits, from + 4u * i);
                PUT(weights, 2 * i, halves((g() & 1u) == 0u ? a : b))
                biases[i] = halves(shuffle(bias, from + 4u * i));
            }
#if !defined(NO_V)
            UNROLL for (uint i = 0u; i < WIDTH / 32u; ++i) {
                PAIRS(i)
                LEFT a, b;
                PUT(a, 0, codes_of(x[0], biases[0], magic_bits))
                PUT(a, 2, codes_of(x[1], biases[1], magic_bits))
                PUT(a, 4, codes_of(x[0] >> 8, biases[0], magic_bits))
                PUT(a, 6, codes_of(x[1] >> 8, biases[1], magic_bits))
                acc[2u * i] = multiply_add(a, weights, acc[2u * i]);
                PUT(b, 0, codes_of(y[0], biases[0], magic_bits))
                PUT(b, 2, codes_of(y[1], biases[1], magic_bits))
                PUT(b, 4, codes_of(y[0] >> 8, biases[0], magic_bits))
                PUT(b, 6, codes_of(y[1] >> 8, biases[1], magic_bits))
                acc[2u * i + 1u] = multiply_add(b, weights, acc[2u * i + 1u]);
            }
#else
            acc[0] = multiply_add(LEFT(HALF(1.0)), weights, acc[0]);
#endif
        }
#endif
#if !defined(NO_LOADS)
        v = load_values(v_source, j0 + step, end);
#endif
    }
}

#if defined(VALUE_QUADS)
#define OWN_VEC(i) (4u * g() + (i))
#else
#define OWN_VEC(i) (8u * (i) + g())
#endif
void finish(RowTile tile, uint item, uint split, State state, SUMS acc[STEPS]) {
    float sum = state.row_sum;
    for (uint step = 4u; step < 32u; step *= 2u) sum += shuffle_float(sum, LANE ^ step);
    if (g() == 0u) group_state[SUBGROUP * ROWS + t()] = vec2(state.row_max, sum);
#if defined(BLOCKS)
    float factor = 1.0 / shuffle_float(state.norm, 8u * t());
#else
    float factor = 1.0 / state.norm;
#endif
    UNROLL for (uint i = 0u; i < STEPS / 2u; ++i)
        sums[(SUBGROUP * ROWS + t()) * (WIDTH / 4u) + OWN_VEC(i)] = factor
            * vec4(PART(acc[2u * i], 0) + PART(acc[2u * i], 1), PART(acc[2u * i], 2) + PART(acc[2u * i], 3),
                   PART(acc[2u * i + 1u], 0) + PART(acc[2u * i + 1u], 1),
                   PART(acc[2u * i + 1u], 2) + PART(acc[2u * i + 1u], 3));
    barrier();
    bool is_whole = num_splits() == 1u;
    uint vecs = is_whole ? out_vecs() : value_vecs();
    for (uint n = gl_LocalInvocationIndex; n < min(tile.rows - tile.first, uint(ROWS)) * vecs; n += THREADS) {
        uint r = n / vecs, e = n % vecs;
        vec2 whole = vec2(LOWEST, 0.0);
        for (uint s = 0u; s < SUBGROUPS; ++s) whole.x = max(whole.x, group_state[s * ROWS + r].x);
        vec4 sum = vec4(0.0);
        for (uint s = 0u; s < SUBGROUPS; ++s) {
            vec2 part = group_state[s * ROWS + r];
            float factor = exp(part.x - whole.x);
            whole.y = fma(part.y, factor, whole.y);
            if (e < value_vecs()) sum = fma(sums[(s * ROWS + r) * (WIDTH / 4u) + e], vec4(factor), sum);
        }
        uint at = part_index(item, split, r);
        if (is_whole) write_out(tile, tile.first + r, e, sum, whole);
        else parts[at + 1u + e] = sum;
        if (e != 0u) continue;
        if (is_whole) write_lse(tile, tile.first + r, whole);
        else parts[at] = vec4(whole, 0.0, 0.0);
    }
}

void main() {
    uint items = num_row_tiles() * num_splits();
    for (uint index = gl_WorkGroupID.x; index < items; index += gl_NumWorkGroups.x) {
        uint item = index / num_splits(), split = index % num_splits();
        RowTile tile = row_tile(item);
        uint begin = tile_key_begin(tile) + split * keys_per_split();
        uint end = min(begin + keys_per_split(), tile_key_end(tile));
        State state = State(LOWEST, 0.0, 0.0, 1.0);
        SUMS acc[STEPS];
        UNROLL for (uint i = 0u; i < STEPS; ++i) acc[i] = no_sums();
        if (begin < end) attend(tile, begin, end, state, acc);
        barrier();
        finish(tile, item, split, state, acc);
        if (num_splits() > 1u && is_last(item)) merge_parts(tile, item);
        barrier();
    }
}
