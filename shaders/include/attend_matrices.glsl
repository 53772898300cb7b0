// The loop of attn_split_quant_coopmat over the keys of an item. One function: matrices that go in and out of others end up
// in memory with some drivers.
// The tiles of keys are written twice: with what masks and other options need in between, the compiler makes worse of the
// rest (3 to 6 us of 100 on an H200).
// Includer must include code_matrices.glsl and define State, RAISE_MAXIMUM and CHOOSE_NORM.

// The weights p of the scores s, and w with the scales of the values in them. Scales of keys that nobody attends may be
// NaN, and a weight of 0 must not meet them.
#if defined(BLOCKS)
#define WEIGH                                                                                     \
    largest = 0.0;                                                                                \
    UNROLL for (uint h = 0u; h < 2u; ++h) {                                                       \
        p[h] = floatBitsToUint(s[h]) == MINUS_INFINITY ? 0.0 : exp(s[h] - state.row_max);         \
        uvec2 v_scale = p[h] == 0.0 ? uvec2(0u) : SCALES_OF(v, h);                                \
        UNROLL for (uint b = 0u; b < BLOCKS; ++b) {                                               \
            w[2u * b + h] = p[h] * unpackHalf2x16(v_scale[b / 2u])[b % 2u];                       \
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

// Goes through the keys [begin, end); `plain` if nothing but the scale applies to their scores.
void attend(RowTile tile, uint begin, uint end, bool plain, inout State state, inout SUMS acc[STEPS]) {
    Source k_source = source_of(push.key_base + key_offset(), tile.b * k_stride_batch() + tile.hk * k_stride_head(),
                                k_stride_batch(), k_stride_row(), head_vecs());
    Source v_source = source_of(push.value_base + value_offset(),
                                tile.b * v_stride_batch() + tile.hk * v_stride_head(), v_stride_batch(),
                                v_stride_row(), value_vecs());
    uint step = SUBGROUPS * 16u, j0 = begin + SUBGROUP * 16u;
    Keys k = fetch_keys(k_source, j0, end);
    Values v = fetch_values(v_source, j0, end);
    // Row g / 2 of the queries as columns g, and what undoes the power of two of row t.
    RIGHT q[STEPS];
    float norm, score_scale = scale();
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
        UNROLL for (uint i = 0u; i < STEPS; ++i) {
            vec4 y = x[i] * factor;
            PUT(q[i], 0, own_part(y.xz))
            PUT(q[i], 2, own_part(y.yw))
        }
        norm = shuffle_float(1.0 / factor, 8u * t());
    }
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
