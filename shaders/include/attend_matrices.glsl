// The loop of attn_split_quant_coopmat over the keys of an item. One function: matrices that go in and out of others end up
// in memory with some drivers.
// Includer must include code_matrices.glsl and define State, RAISE_MAXIMUM and CHOOSE_NORM.

#if defined(KEY_INT8)
#define KEY_CODES(low, high, a)              \
    PUT(a, 0, LOW_CODES(low))                \
    PUT(a, 2, LOW_CODES((low) >> 8))         \
    PUT(a, 4, LOW_CODES(high))               \
    PUT(a, 6, LOW_CODES((high) >> 8))
// The scores, but for the scale of attention, of the keys that are held.
#define SCORES(s)                                                                                        \
    {                                                                                                    \
        SUMS dots, more = no_sums(); /* two chains: each product waits for the one before */             \
        PART(dots, 0) = PART(dots, 1) = bias_of(k.scale[0].y) * q_sum[0];                                \
        PART(dots, 2) = PART(dots, 3) = bias_of(k.scale[1].y) * q_sum[0];                                \
        UNROLL for (uint i = 0u; i < STEPS; ++i) {                                                       \
            uint low = k.unit[i / 4u][i % 4u], high = k.unit[KEY_UNITS + i / 4u][i % 4u];                \
            LEFT a;                                                                                      \
            KEY_CODES(low, high, a)                                                                      \
            if (i % 2u == 0u) dots = multiply_add(a, q[i], dots);                                        \
            else more = multiply_add(a, q[i], more);                                                     \
        }                                                                                                \
        s[0] = (PART(dots, 0) + PART(dots, 1) + (PART(more, 0) + PART(more, 1))) * CODE_UNITS * norm * uintBitsToFloat(k.scale[0].x); \
        s[1] = (PART(dots, 2) + PART(dots, 3) + (PART(more, 2) + PART(more, 3))) * CODE_UNITS * norm * uintBitsToFloat(k.scale[1].x); \
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
                s[0] = fma(both.x, unpackHalf2x16(k.scale[0][b / 2u])[b % 2u], s[0]);                    \
                s[1] = fma(both.y, unpackHalf2x16(k.scale[1][b / 2u])[b % 2u], s[1]);                    \
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
        uvec2 scale = p[h] == 0.0 ? uvec2(0u) : v.scale[h];                                       \
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
    float norm, q_sum[BIASES], score_scale = scale();
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
        UNROLL for (uint b = 0u; b < BIASES; ++b) q_sum[b] = 0.0;
        UNROLL for (uint i = 0u; i < STEPS; ++i) {
            vec4 y = x[i] * factor;
#if defined(BLOCKS)
            q_sum[i / 2u] += y.x + y.y + (y.z + y.w);
#else
            q_sum[0] += y.x + y.y + (y.z + y.w);
#endif
#if defined(KEY_Q4_0)  // these meet the upper four bits
            if (i % 2u == 1u) y *= 0.0625;
#endif
            PUT(q[i], 0, own_part(y.xz))
            PUT(q[i], 2, own_part(y.yw))
        }
        UNROLL for (uint b = 0u; b < BIASES; ++b) {
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
    float s[2];  // of keys g and g + 8 and row t
    SCORES(s)
    k = fetch_keys(k_source, j0 + step, end);
    for (; j0 < end; j0 += step) {
        if (plain) {
            UNROLL for (uint h = 0u; h < 2u; ++h)
                s[h] = j0 + 8u * h + g() < end ? s[h] * score_scale : uintBitsToFloat(MINUS_INFINITY);
        } else {
            [[dont_unroll]] for (uint h = 0u; h < 2u; ++h) {  // one copy
                uint j = j0 + 8u * h + g();
                float x = uintBitsToFloat(MINUS_INFINITY);
                if (j < end) x = masked_score(h == 0u ? s[0] : s[1], rule, score_rows[t()], j);
                if (h == 0u) s[0] = x;
                else s[1] = x;
            }
        }
        float next[2];  // scores: they do not wait for these weights
#if !defined(X_LATE)
        SCORES(next)
        X_LOAD(k = fetch_keys(k_source, j0 + 2u * step, end);)
#endif
        float p[2], w[2 * BIASES], largest;
        WEIGH
        if (any_of(max(s[0], s[1]) > state.row_max || largest > state.limit)) {
            RAISE_MAXIMUM
            WEIGH
            CHOOSE_NORM(largest)
        }
        state.row_sum += p[0] + p[1];

        uint from = 4u * t() + g() / 2u;
        bool even = (g() & 1u) == 0u;
#if defined(BLOCKS)
        uint near = from + 16u * (g() & 1u), far = from + 16u * (~g() & 1u);
        UNROLL for (uint b = 0u; b < WORDS; ++b) {
            if (b >= v_source.live) continue;
            // Columns g with the leading bits, and those with the rest, need words of the same two invocations, of keys t
            // and t + 4: the former take from the first one first, the latter from the other one.
            vec2 whole = vec2(w[2u * b], w[2u * b + 1u]) * state.norm, high = leading(whole);
            state.bias_sum[b] = fma(whole.x + whole.y, CODE_BIAS, state.bias_sum[b]);
            uint high_bits = half_bits_of(rounded(high)), rest_bits = half_bits_of(rounded(whole - high));
            bool gives_high = (g() & 4u) == 0u;
            uint one = shuffle(gives_high ? high_bits : rest_bits, near);
            uint other = shuffle(gives_high ? rest_bits : high_bits, far);
            RIGHT weights;
            PUT(weights, 0, halves(even ? one : other))
            PUT(weights, 2, halves(even ? other : one))
#else
        vec2 whole = vec2(w[0], w[1]) * state.norm, high = leading(whole);
        state.bias_sum[0] = fma(whole.x, bias_of(v.scale[0].y), fma(whole.y, bias_of(v.scale[1].y), state.bias_sum[0]));
        uint high_bits = half_bits_of(rounded(high)), rest_bits = half_bits_of(rounded(whole - high));
        RIGHT weights;
        UNROLL for (uint i = 0u; i < 2u; ++i) {
            uint one = shuffle(high_bits, from + 16u * i), other = shuffle(rest_bits, from + 16u * i);
            PUT(weights, 2 * i, halves(even ? one : other))
        }
        UNROLL for (uint b = 0u; b < WORDS; ++b) {
#endif
            uint x[2], y[2];  // bytes 0 and 1 of both values of a pair, and bytes 2 and 3
            UNROLL for (uint i = 0u; i < 2u; ++i) {
                x[i] = VALUE_WORD(v, 2u * i, b) & 0xFFFFu | VALUE_WORD(v, 2u * i + 1u, b) << 16;
                y[i] = VALUE_WORD(v, 2u * i, b) >> 16 | VALUE_WORD(v, 2u * i + 1u, b) & 0xFFFF0000u;
            }
            LEFT first, second;
            PUT(first, 0, VALUE_CODES(x[0]))
            PUT(first, 2, VALUE_CODES(x[1]))
            PUT(first, 4, VALUE_CODES(x[0] >> 8))
            PUT(first, 6, VALUE_CODES(x[1] >> 8))
            acc[2u * b] = multiply_add(first, weights, acc[2u * b]);
            PUT(second, 0, VALUE_CODES(y[0]))
            PUT(second, 2, VALUE_CODES(y[1]))
            PUT(second, 4, VALUE_CODES(y[0] >> 8))
            PUT(second, 6, VALUE_CODES(y[1] >> 8))
            acc[2u * b + 1u] = multiply_add(second, weights, acc[2u * b + 1u]);
        }
        X_LOAD(v = fetch_values(v_source, j0 + step, end);)
#if defined(X_LATE)
        SCORES(next)
        X_LOAD(k = fetch_keys(k_source, j0 + 2u * step, end);)
#endif
        s = next;
    }
}
