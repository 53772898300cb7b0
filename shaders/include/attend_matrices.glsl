// The loop of attn_split_quant_coopmat over the keys of an item. One function: matrices that go in and out of others end up
// in memory with some drivers.
// Includer must include code_matrices.glsl and define State, RAISE_MAXIMUM and CHOOSE_NORM.

// Goes through the keys [begin, end); `plain` if nothing but the scale applies to their scores.
void attend(RowTile tile, uint begin, uint end, bool plain, inout State state, inout SUMS acc[STEPS]) {
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
    Source k_source = source_of(push.key_base + key_offset(), tile.b * k_stride_batch() + tile.hk * k_stride_head(),
                                k_stride_batch(), k_stride_row(), head_vecs());
    Source v_source = source_of(push.value_base + value_offset(),
                                tile.b * v_stride_batch() + tile.hk * v_stride_head(), v_stride_batch(),
                                v_stride_row(), value_vecs());
    uint two_1024 = two_1024_bits(), step = SUBGROUPS * 16u, j0 = begin + SUBGROUP * 16u;
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
    Keys k = fetch_keys(k_source, j0, end);
    Values v = fetch_values(v_source, j0, end);
    for (; j0 < end; j0 += step) {
        float s[2];  // of keys g and g + 8 and row t
#if defined(BLOCKS)
        s[0] = 0.0;
        s[1] = 0.0;
        UNROLL for (uint b = 0u; b < BLOCKS; ++b) {
            KEY_UNIT low = k.unit[b], high = k.unit[KEY_UNITS + b];
            LEFT first, second;
#if defined(KEY_Q4_0)
            PUT(first, 0, LOW_NIBBLES(low))
            PUT(first, 2, LOW_NIBBLES(low >> 8))
            PUT(first, 4, LOW_NIBBLES(high))
            PUT(first, 6, LOW_NIBBLES(high >> 8))
            PUT(second, 0, HIGH_NIBBLES(low))
            PUT(second, 2, HIGH_NIBBLES(low >> 8))
            PUT(second, 4, HIGH_NIBBLES(high))
            PUT(second, 6, HIGH_NIBBLES(high >> 8))
#else
            HALF2 bias = HALF2(1152.0);
            PUT(first, 0, codes_of(low.x, bias, two_1024))
            PUT(first, 2, codes_of(low.x >> 8, bias, two_1024))
            PUT(first, 4, codes_of(high.x, bias, two_1024))
            PUT(first, 6, codes_of(high.x >> 8, bias, two_1024))
            PUT(second, 0, codes_of(low.y, bias, two_1024))
            PUT(second, 2, codes_of(low.y >> 8, bias, two_1024))
            PUT(second, 4, codes_of(high.y, bias, two_1024))
            PUT(second, 6, codes_of(high.y >> 8, bias, two_1024))
#endif
            SUMS dots = multiply_add(second, q[2u * b + 1u], multiply_add(first, q[2u * b], no_sums()));
            if (b < k_source.live) {  // what pads a scale may be anything
                vec2 both = vec2(PART(dots, 0) + PART(dots, 1), PART(dots, 2) + PART(dots, 3));
                s[0] = fma(both.x, unpackHalf2x16(k.scale[0][b / 2u])[b % 2u], s[0]);
                s[1] = fma(both.y, unpackHalf2x16(k.scale[1][b / 2u])[b % 2u], s[1]);
            }
        }
        s[0] *= norm;
        s[1] *= norm;
#else
        HALF2 low_bias = halves(bias_bits(k.scale[0].y) * 0x10001u);
        HALF2 high_bias = halves(bias_bits(k.scale[1].y) * 0x10001u);
        SUMS dots = no_sums(), more = no_sums();  // two chains: each product waits for the one before
        UNROLL for (uint i = 0u; i < STEPS; ++i) {
            uint low = k.unit[i / 4u][i % 4u], high = k.unit[KEY_UNITS + i / 4u][i % 4u];
            LEFT a;
            PUT(a, 0, codes_of(low, low_bias, two_1024))
            PUT(a, 2, codes_of(low >> 8, low_bias, two_1024))
            PUT(a, 4, codes_of(high, high_bias, two_1024))
            PUT(a, 6, codes_of(high >> 8, high_bias, two_1024))
            if (i % 2u == 0u) dots = multiply_add(a, q[i], dots);
            else more = multiply_add(a, q[i], more);
        }
        s[0] = (PART(dots, 0) + PART(dots, 1) + (PART(more, 0) + PART(more, 1))) * norm * uintBitsToFloat(k.scale[0].x);
        s[1] = (PART(dots, 2) + PART(dots, 3) + (PART(more, 2) + PART(more, 3))) * norm * uintBitsToFloat(k.scale[1].x);
#endif
        k = fetch_keys(k_source, j0 + step, end);

        float p[2];
        bool moves = false;
#if defined(BLOCKS)
        UNROLL for (uint h = 0u; h < 2u; ++h) {
            uint j = j0 + 8u * h + g();
            float x = uintBitsToFloat(MINUS_INFINITY);
            if (j < end) x = plain ? s[h] * score_scale : masked_score(s[h], rule, score_rows[t()], j);
            s[h] = x;
            moves = moves || x > state.row_max;
        }
        moves = any_of(moves);
        if (moves) RAISE_MAXIMUM
        // Scales of keys that nobody attends may be NaN, and a weight of 0 must not meet them.
        uvec2 scale[2];
        UNROLL for (uint h = 0u; h < 2u; ++h) {
            p[h] = floatBitsToUint(s[h]) == MINUS_INFINITY ? 0.0 : exp(s[h] - state.row_max);
            state.row_sum += p[h];
            scale[h] = p[h] == 0.0 ? uvec2(0u) : v.scale[h];
        }
        float w[2 * BLOCKS], largest = 0.0;
        UNROLL for (uint b = 0u; b < BLOCKS; ++b)
            UNROLL for (uint h = 0u; h < 2u; ++h) {
                w[2u * b + h] = p[h] * unpackHalf2x16(scale[h][b / 2u])[b % 2u];
                if (b < v_source.live) largest = max(largest, abs(w[2u * b + h]));
            }
        if (any_of(moves || largest > state.limit)) CHOOSE_NORM(largest)

        uint from = 8u * t() + g() / 2u, near = from + 4u * (g() & 1u), far = from + 4u * (~g() & 1u);
        UNROLL for (uint b = 0u; b < WORDS; ++b) {
            if (b >= v_source.live) continue;
            // Columns g with the leading bits, and those with the rest, need words of the same two invocations, of an
            // even g and of an odd one: the former take from the even one first, the latter from the odd one.
            vec2 whole = vec2(w[2u * b], w[2u * b + 1u]) * state.norm, high = leading(whole);
            uint high_bits = half_bits_of(rounded(high)), rest_bits = half_bits_of(rounded(whole - high));
            bool even = (g() & 1u) == 0u;
            uint one = shuffle(even ? high_bits : rest_bits, near);
            uint other = shuffle(even ? rest_bits : high_bits, far);
            RIGHT weights;
            PUT(weights, 0, halves(even ? one : other))
            PUT(weights, 2, halves(even ? other : one))
#else
        float w[2];
        UNROLL for (uint h = 0u; h < 2u; ++h) {
            uint j = j0 + 8u * h + g();
            float x = uintBitsToFloat(MINUS_INFINITY);
            if (j < end) x = plain ? s[h] * score_scale : masked_score(s[h], rule, score_rows[t()], j);
            s[h] = x;
            p[h] = floatBitsToUint(x) == MINUS_INFINITY ? 0.0 : exp(x - state.row_max);
            w[h] = p[h] == 0.0 ? 0.0 : p[h] * uintBitsToFloat(v.scale[h].x);  // a weight of 0 must not meet a NaN
            moves = moves || x > state.row_max || abs(w[h]) > state.limit;
        }
        if (any_of(moves)) {
            RAISE_MAXIMUM
            float largest = 0.0;
            UNROLL for (uint h = 0u; h < 2u; ++h) {
                p[h] = floatBitsToUint(s[h]) == MINUS_INFINITY ? 0.0 : exp(s[h] - state.row_max);
                w[h] = p[h] == 0.0 ? 0.0 : p[h] * uintBitsToFloat(v.scale[h].x);
                largest = max(largest, abs(w[h]));
            }
            CHOOSE_NORM(largest)
        }
        UNROLL for (uint h = 0u; h < 2u; ++h) {
            state.row_sum += p[h];
            w[h] *= state.norm;
        }
        vec2 whole = vec2(w[0], w[1]), high = leading(whole);
        uint high_bits = half_bits_of(rounded(high)), rest_bits = half_bits_of(rounded(whole - high));
        uint bias_pair = bias_bits(v.scale[0].y) | bias_bits(v.scale[1].y) << 16, from = 8u * t() + g() / 2u;
        RIGHT weights;
        HALF2 bias[2];
        UNROLL for (uint i = 0u; i < 2u; ++i) {
            uint one = shuffle(high_bits, from + 4u * i), other = shuffle(rest_bits, from + 4u * i);
            PUT(weights, 2 * i, halves((g() & 1u) == 0u ? one : other))
            bias[i] = halves(shuffle(bias_pair, from + 4u * i));
        }
        UNROLL for (uint b = 0u; b < WORDS; ++b) {
#endif
            uint x[2], y[2];  // bytes 0 and 1 of both values of a pair, and bytes 2 and 3
            UNROLL for (uint i = 0u; i < 2u; ++i) {
                x[i] = VALUE_WORD(v, 2u * i, b) & 0xFFFFu | VALUE_WORD(v, 2u * i + 1u, b) << 16;
                y[i] = VALUE_WORD(v, 2u * i, b) >> 16 | VALUE_WORD(v, 2u * i + 1u, b) & 0xFFFF0000u;
            }
            LEFT first, second;
            PUT(first, 0, VALUE_CODES(x[0], 0))
            PUT(first, 2, VALUE_CODES(x[1], 1))
            PUT(first, 4, VALUE_CODES(x[0] >> 8, 0))
            PUT(first, 6, VALUE_CODES(x[1] >> 8, 1))
            acc[2u * b] = multiply_add(first, weights, acc[2u * b]);
            PUT(second, 0, VALUE_CODES(y[0], 0))
            PUT(second, 2, VALUE_CODES(y[1], 1))
            PUT(second, 4, VALUE_CODES(y[0] >> 8, 0))
            PUT(second, 6, VALUE_CODES(y[1] >> 8, 1))
            acc[2u * b + 1u] = multiply_add(second, weights, acc[2u * b + 1u]);
        }
        v = fetch_values(v_source, j0 + step, end);
    }
}
