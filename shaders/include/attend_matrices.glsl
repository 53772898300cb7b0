// The loop of attn_split_quant_coopmat over the keys of an item. One function: matrices that go in and out of others
// end up in memory with some drivers.
// The tiles of keys are there twice: with what masks and other options need in between, the rest becomes slower (2 to
// 6 us of 100 on an H200).
// Includer must include code_matrices.glsl and define State, RAISE_MAXIMUM and CHOOSE_NORM.

// The weights p of the scores s, and w with the scales of the values in them. Scales of keys that nobody attends may be
// NaN, and a weight of 0 must not meet them; where nothing but the scale applies, all keys are attended.
#define IS_NOTHING(x) (!PLAIN && (x))
#if defined(BLOCKS)
#define WEIGH                                                                                                \
    largest = 0.0;                                                                                           \
    UNROLL for (uint h = 0u; h < 2u; ++h) {                                                                  \
        p[h] = IS_NOTHING(floatBitsToUint(s[h]) == MINUS_INFINITY) ? 0.0 : exp(s[h] - state.row_max);        \
        uvec2 v_scale = IS_NOTHING(p[h] == 0.0) ? uvec2(0u) : SCALES_OF(v, h);                               \
        UNROLL for (uint b = 0u; b < BLOCKS; ++b) {                                                          \
            w[2u * b + h] = p[h] * NORM_IN_WEIGHTS * unpackHalf2x16(v_scale[b / 2u])[b % 2u];                \
            if (b < v_source.live) largest = max(largest, abs(w[2u * b + h]));                               \
        }                                                                                                    \
    }
#else
#define WEIGH                                                                                                \
    largest = 0.0;                                                                                           \
    UNROLL for (uint h = 0u; h < 2u; ++h) {                                                                  \
        p[h] = IS_NOTHING(floatBitsToUint(s[h]) == MINUS_INFINITY) ? 0.0 : exp(s[h] - state.row_max);        \
        w[h] = IS_NOTHING(p[h] == 0.0) ? 0.0 : p[h] * uintBitsToFloat(v.scale[h].x);                         \
        largest = max(largest, abs(w[h]));                                                                   \
    }
#endif

// Queries of steps 2 pair and 2 pair + 1. The place depends on j0, or they would be read once, into registers.
#define QUERIES(pair, even_step, odd_step)                              \
    RIGHT even_step, odd_step;                                          \
    {                                                                   \
        uvec4 words = query_words[(pair) * 32u + LANE + (j0 >> 31)];    \
        PUT(even_step, 0, halves(words.x))                              \
        PUT(even_step, 2, halves(words.y))                              \
        PUT(odd_step, 0, halves(words.z))                               \
        PUT(odd_step, 2, halves(words.w))                               \
    }

// Goes through the keys [begin, end); `plain` if nothing but the scale applies to their scores.
void attend(RowTile tile, uint begin, uint end, bool plain, inout State state, inout SUMS acc[STEPS]) {
    Source k_source = source_of(push.key_base + key_offset(), tile.b * k_stride_batch() + tile.hk * k_stride_head(),
                                k_stride_batch(), k_stride_row(), head_vecs());
    Source v_source = source_of(push.value_base + value_offset(),
                                tile.b * v_stride_batch() + tile.hk * v_stride_head(), v_stride_batch(),
                                v_stride_row(), value_vecs());
    uint step = SUBGROUPS * 16u, j0 = begin + SUBGROUP * 16u;
    Keys k;
    Values v;
    FETCH_KEYS(j0)
    FETCH_VALUES(j0)
    // Each vec of the queries is read by one invocation. Row g / 2 is columns g, as each subgroup wants it: one writes
    // it down, for 16 registers less.
    for (uint n = gl_LocalInvocationIndex; n < ROWS * (WIDTH / 4u); n += THREADS) {
        uint row = tile.first + n / (WIDTH / 4u), d = n % (WIDTH / 4u);
        sums[n] = vec4(0.0);
        if (row < tile.rows && d < head_vecs())
            sums[n] = read_query(push.query_base + tile.b * q_stride_batch() + row_head(tile, row) * q_stride_head()
                                 + row_token(row) * q_stride_row() + d);
    }
    barrier();
    float norm;  // what undoes the power of two of row t; with the scale, if there is nothing else
    {
        vec4 x[STEPS];
        float largest = 0.0;
        UNROLL for (uint i = 0u; i < STEPS; ++i) {
            x[i] = sums[g() / 2u * (WIDTH / 4u) + query_vec_index(i)];
            vec4 size = abs(x[i]);
            largest = max(largest, max(max(size.x, size.y), max(size.z, size.w)));
        }
        largest = max(largest, shuffle_float(largest, LANE ^ 1u));
        largest = max(largest, shuffle_float(largest, LANE ^ 2u));
        float factor = power_of_2(clamp(13 - exponent_of(largest), -120, 120));  // the largest becomes [2^13, 2^14)
        if (SUBGROUP == 0u)
            UNROLL for (uint i = 0u; i < STEPS; i += 2u) {
                vec4 y = x[i] * factor, z = x[i + 1u] * factor;
                query_words[i / 2u * 32u + LANE] = uvec4(half_bits_of(own_part(y.xz)), half_bits_of(own_part(y.yw)),
                                                         half_bits_of(own_part(z.xz)), half_bits_of(own_part(z.yw)));
            }
        norm = shuffle_float(1.0 / factor, 8u * t()) * (plain ? scale() : 1.0);
    }
    barrier();
    uint two_1024 = two_1024_bits();
#if defined(KEY_Q4_0)  // of values neighbours have the same words, the even one the lower four bits
    bool upper = (g() & 1u) != 0u;
    uint own_mask = upper ? 0x00F000F0u : 0x000F000Fu;
    HALF own_factor = upper ? HALF(0.0625) : HALF(1.0), own_bias = upper ? HALF(72.0) : HALF(1032.0);
#define VALUE_CODES(bits, i) nibbles_of(bits, own_mask, own_factor, own_bias, two_1024)
#elif defined(KEY_Q8_0)
#define VALUE_CODES(bits, i) codes_of(bits, HALF2(1152.0), two_1024)
#else
#define VALUE_CODES(bits, i) codes_of(bits, bias[i], two_1024)
#endif
#if defined(EMULATED)  // a loop for both, as compilers of software devices take long
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
