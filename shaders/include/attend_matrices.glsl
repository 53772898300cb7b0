// The loop of attn_split_quant_coopmat over the keys of an item. One function: matrices that go in and out of others end up
// in memory with some drivers.
// Includer must include code_matrices.glsl and define State, RAISE_MAXIMUM and CHOOSE_NORM.

#if defined(KEY_INT8)
#define KEY_CODES(low, high, a)              \
    PUT(a, 0, LOW_CODES(low))                \
    PUT(a, 2, LOW_CODES((low) >> 8))         \
    PUT(a, 4, LOW_CODES(high))               \
    PUT(a, 6, LOW_CODES((high) >> 8))
// The scores, but for the scale of attention, of the keys that are held: 32 elements at a time, so that no sum is large.
#define SCORES(s)                                                                                        \
    {                                                                                                    \
        float low_bias = bias_of(k.scale[0].y), high_bias = bias_of(k.scale[1].y);                       \
        s[0] = s[1] = 0.0;                                                                               \
        UNROLL for (uint b = 0u; b < WORDS; ++b) {                                                       \
            SUMS dots;                                                                                   \
            PART(dots, 0) = PART(dots, 1) = low_bias * q_sum[b];                                         \
            PART(dots, 2) = PART(dots, 3) = high_bias * q_sum[b];                                        \
            UNROLL for (uint i = 2u * b; i < 2u * b + 2u; ++i) {                                         \
                uint low = k.unit[i / 4u][i % 4u], high = k.unit[KEY_UNITS + i / 4u][i % 4u];            \
                LEFT a;                                                                                  \
                KEY_CODES(low, high, a)                                                                  \
                dots = multiply_add(a, q[i], dots);                                                      \
            }                                                                                            \
            s[0] += PART(dots, 0) + PART(dots, 1);                                                       \
            s[1] += PART(dots, 2) + PART(dots, 3);                                                       \
        }                                                                                                \
        s[0] = s[0] * CODE_UNITS * norm * uintBitsToFloat(k.scale[0].x);                                 \
        s[1] = s[1] * CODE_UNITS * norm * uintBitsToFloat(k.scale[1].x);                                 \
    }
#else
#if defined(KEY_Q4_0)
#define KEY_CODES(n, low, high, a)                                \
    PUT(a, 0, n == 0 ? LOW_CODES(low) : HIGH_CODES(low))          \
    PUT(a, 2, n == 0 ? LOW_CODES((low) >> 8) : HIGH_CODES((low) >> 8))   \
    PUT(a, 4, n == 0 ? LOW_CODES(high) : HIGH_CODES(high))        \
    PUT(a, 6, n == 0 ? LOW_CODES((high) >> 8) : HIGH_CODES((high) >> 8))
#else
#define KEY_CODES(n, low, high, a)           \
    PUT(a, 0, LOW_CODES(low[n]))             \
    PUT(a, 2, LOW_CODES(low[n] >> 8))        \
    PUT(a, 4, LOW_CODES(high[n]))            \
    PUT(a, 6, LOW_CODES(high[n] >> 8))
#endif
#define SCORES(s)                                                                                        \
    {                                                                                                    \
        uvec2 k_scale[2] = uvec2[2](SCALES_OF(k, 0), SCALES_OF(k, 1));                                   \
        s[0] = s[1] = 0.0;                                                                               \
        UNROLL for (uint b = 0u; b < BLOCKS; ++b) {                                                      \
            KEY_UNIT low = k.unit[b], high = k.unit[KEY_UNITS + b];                                      \
            LEFT first, second;                                                                          \
            KEY_CODES(0, low, high, first)                                                               \
            KEY_CODES(1, low, high, second)                                                              \
            SUMS dots;                                                                                   \
            UNROLL for (uint c = 0u; c < 4u; ++c) PART(dots, c) = q_sum[b];                              \
            dots = multiply_add(second, q[2u * b + 1u], multiply_add(first, q[2u * b], dots));           \
            if (b < k_source.live) { /* what pads a scale may be anything */                             \
                vec2 both = vec2(PART(dots, 0) + PART(dots, 1), PART(dots, 2) + PART(dots, 3));          \
                s[0] = fma(both.x, unpackHalf2x16(k_scale[0][b / 2u])[b % 2u], s[0]);                    \
                s[1] = fma(both.y, unpackHalf2x16(k_scale[1][b / 2u])[b % 2u], s[1]);                    \
            }                                                                                            \
        }                                                                                                \
        s[0] = s[0] * CODE_UNITS * norm;                                                                                    \
        s[1] = s[1] * CODE_UNITS * norm;                                                                                    \
    }
#endif

// The weights p of the scores s, and w with the scales of the values in them. Scales of keys that nobody attends may be
// NaN, and a weight of 0 must not meet them.
#if defined(BLOCKS)
#define WEIGH                                                                                     \
    largest = 0.0;                                                                                \
    UNROLL for (uint h = 0u; h < 2u; ++h) {                                                       \
        p[h] = floatBitsToUint(s[h]) == MINUS_INFINITY ? 0.0 : exp(s[h] - state.row_max);         \
        uvec2 scale = p[h] == 0.0 ? uvec2(0u) : SCALES_OF(v, h);                                       \
        UNROLL for (uint b = 0u; b < BLOCKS; ++b) {                                               \
            w[2u * b + h] = p[h] * unpackHalf2x16(scale[b / 2u])[b % 2u];                         \
            if (b < v_source.live) largest = max(largest, abs(w[2u * b + h]));                    \
        }                                                                                         \
    }
#else
#define WEIGH                                                                                     \
    largest = 0.0;                                                                                \
    UNROLL for (uint h = 0u; h < 2u; ++h) {                                                       \
        p[h] = floatBitsToUint(s[h]) == MINUS_INFINITY ? 0.0 : exp(s[h] - state.row_max);         \
        w[h] = p[h] == 0.0 ? 0.0 : p[h] * uintBitsToFloat(v.scale[h].x);                          \
        largest = max(largest, abs(w[h]));                                                        \
    }
#endif
#if defined(X_NOLOADS)
#define X_LOAD(x)
#else
#define X_LOAD(x) x
#endif

// Goes through the keys [begin, end); `plain` if nothing but the scale applies to their scores.
void attend(RowTile tile, uint begin, uint end, bool plain, inout State state, inout SUMS acc[STEPS]) {
    Source k_source = source_of(push.key_base + key_offset(), tile.b * k_stride_batch() + tile.hk * k_stride_head(),
                                k_stride_batch(), k_stride_row(), head_vecs());
    Source v_source = source_of(push.value_base + value_offset(),
                                tile.b * v_stride_batch() + tile.hk * v_stride_head(), v_stride_batch(),
                                v_stride_row(), value_vecs());
    uint step = SUBGROUPS * 16u, j0 = begin + SUBGROUP * 16u;
    if (j0 >= end) return;
    Keys k = fetch_keys(k_source, j0, end);
    Values v = fetch_values(v_source, j0, end);
    // Row g / 2 of the queries as columns g, and what undoes the power of two of row t. q_sum is what the bias adds.
    RIGHT q[STEPS];
    float norm, q_sum[WORDS], score_scale = scale();
    {
        uint row = tile.first + g() / 2u;
        vec4 x[STEPS];
        float largest = 0.0;
        UNROLL for (uint i = 0u; i < STEPS; ++i) {
            uint d = query_vec_index(i);
            x[i] = vec4(0.0);
            if (row < tile.rows && d < head_vecs())
                x[i] = read_query(push.query_base + tile.b * q_stride_batch() + row_head(tile, row) * q_stride_head()
                                  + row_token(row) * q_stride_row() + d);
            vec4 size = abs(x[i]);
            largest = max(largest, max(max(size.x, size.y), max(size.z, size.w)));
        }
        largest = max(largest, shuffle_float(largest, LANE ^ 1u));
        largest = max(largest, shuffle_float(largest, LANE ^ 2u));
        float factor = power_of_2(clamp(13 - exponent_of(largest), -120, 120));  // the largest becomes [2^13, 2^14)
        UNROLL for (uint b = 0u; b < WORDS; ++b) q_sum[b] = 0.0;
        UNROLL for (uint i = 0u; i < STEPS; ++i) {
            vec4 y = x[i] * factor;
            q_sum[i / 2u] += y.x + y.y + (y.z + y.w);
#if defined(KEY_Q4_0)  // these meet the upper four bits
            if (i % 2u == 1u) y *= 0.0625;
#endif
            PUT(q[i], 0, own_part(y.xz))
            PUT(q[i], 2, own_part(y.yw))
        }
        UNROLL for (uint b = 0u; b < WORDS; ++b) {
            q_sum[b] += shuffle_float(q_sum[b], LANE ^ 1u);
            q_sum[b] += shuffle_float(q_sum[b], LANE ^ 2u);
            // Of row t, half of it to either column.
            q_sum[b] = shuffle_float(q_sum[b], 8u * t()) * (-0.5 / CODE_UNITS);
#if defined(BLOCKS)
            q_sum[b] *= CODE_BIAS;
#endif
        }
        norm = shuffle_float(1.0 / factor, 8u * t());
    }
#if defined(KEY_Q4_0)  // of values neighbours have the same words, the even one the lower four bits
    uint own_mask = (g() & 1u) != 0u ? 0x00F000F0u : 0x000F000Fu;
#else
    const uint own_mask = 0x00FF00FFu;
#endif
#define VALUE_CODES(bits) halves((bits) & own_mask)
    LEFT bias;  // less than nothing, in the units of the codes
#if defined(BLOCKS)
    HALF2 own_bias = halves(0x80008000u | own_mask & BIAS_BITS);
    UNROLL for (uint c = 0u; c < 8u; c += 2u) PUT(bias, c, own_bias)
#endif
    float s[2];  // of keys g and g + 8 and row t
    SCORES(s)
    k = fetch_keys(k_source, j0 + step, end);
#if defined(X_ONE)
#define PLAIN plain
#include "attend_tiles.glsl"
#else
    if (plain) {
#define PLAIN true
#include "attend_tiles.glsl"
#undef PLAIN
    } else {
#define PLAIN false
#include "attend_tiles.glsl"
#undef PLAIN
    }
#endif
}
