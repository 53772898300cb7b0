// The tiles of attend_matrices.glsl, in its function. PLAIN says whether nothing but the scale applies to scores.
    for (; j0 < end; j0 += step) {
        float s[2];  // of keys g and g + 8 and row t
#if defined(BLOCKS)
        uvec2 k_scale[2] = uvec2[2](SCALES_OF(k, 0), SCALES_OF(k, 1));
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
            QUERIES(b, q_first, q_second)
            SUMS dots = multiply_add(second, q_second, multiply_add(first, q_first, no_sums()));
            FETCH_KEY_UNITS(b, j0 + step)
            if (b < k_source.live) {  // what pads a scale may be anything
                vec2 both = vec2(PART(dots, 0) + PART(dots, 1), PART(dots, 2) + PART(dots, 3));
                s[0] = fma(both.x, unpackHalf2x16(k_scale[0][b / 2u])[b % 2u], s[0]);
                s[1] = fma(both.y, unpackHalf2x16(k_scale[1][b / 2u])[b % 2u], s[1]);
            }
        }
        s[0] *= norm;
        s[1] *= norm;
#else
        HALF2 low_bias = halves(bias_bits(k.scale[0].y) * 0x10001u);
        HALF2 high_bias = halves(bias_bits(k.scale[1].y) * 0x10001u);
        SUMS dots = no_sums(), more = no_sums();  // two chains: each product waits for the one before
        UNROLL for (uint pair = 0u; pair < STEPS / 2u; ++pair) {
            QUERIES(pair, q_first, q_second)
            UNROLL for (uint i = 2u * pair; i < 2u * pair + 2u; ++i) {
                uint low = k.unit[i / 4u][i % 4u], high = k.unit[KEY_UNITS + i / 4u][i % 4u];
                LEFT a;
                PUT(a, 0, codes_of(low, low_bias, two_1024))
                PUT(a, 2, codes_of(low >> 8, low_bias, two_1024))
                PUT(a, 4, codes_of(high, high_bias, two_1024))
                PUT(a, 6, codes_of(high >> 8, high_bias, two_1024))
                if (i % 2u == 0u) dots = multiply_add(a, q_first, dots);
                else more = multiply_add(a, q_second, more);
            }
        }
        s[0] = (PART(dots, 0) + PART(dots, 1) + (PART(more, 0) + PART(more, 1))) * norm * uintBitsToFloat(k.scale[0].x);
        s[1] = (PART(dots, 2) + PART(dots, 3) + (PART(more, 2) + PART(more, 3))) * norm * uintBitsToFloat(k.scale[1].x);
#endif
#if defined(BLOCKS)
        FETCH_SCALES(k, key_scales, k_source, j0 + step)
#else
        FETCH_KEYS(j0 + step)
#endif

        if (PLAIN) {
            UNROLL for (uint h = 0u; h < 2u; ++h)
                s[h] = j0 + 8u * h + g() < end ? s[h] : uintBitsToFloat(MINUS_INFINITY);
        } else {
            [[dont_unroll]] for (uint h = 0u; h < 2u; ++h) {  // long, and once is enough
                uint j = j0 + 8u * h + g();
                float x = uintBitsToFloat(MINUS_INFINITY);
                if (j < end) x = masked_score(h == 0u ? s[0] : s[1], rule, score_rows[t()], j);
                if (h == 0u) s[0] = x;
                else s[1] = x;
            }
        }
        float p[2], w[2 * WEIGHTS], largest;
        WEIGH
        if (any_of(max(s[0], s[1]) > state.row_max || largest > LIMIT)) {
            RAISE_MAXIMUM
            WEIGH
            CHOOSE_NORM(largest)
#if defined(BLOCKS)
            WEIGH
#endif
        }
        state.row_sum += p[0] + p[1];

#if defined(BLOCKS)
        // Row g / 2 of the weights as columns g: the leading bits where g is even, else the rest, of keys t, t + 8 and
        // t + 4, t + 12. All blocks at once, by way of the subgroup's own part of `sums`.
        uvec4 high_words = uvec4(0u), rest_words = uvec4(0u);
        UNROLL for (uint b = 0u; b < WORDS; ++b) {
            vec2 whole = vec2(w[2u * b], w[2u * b + 1u]), high = leading(whole);
            high_words[b] = half_bits_of(rounded(high));
            rest_words[b] = half_bits_of(rounded(whole - high));
        }
        uint own = SUBGROUP * WIDTH, put = own + 16u * t() + 2u * g();
        uint get = own + 16u * (g() / 2u) + 2u * t() + g() % 2u;
        subgroupBarrier();
        sums[put] = uintBitsToFloat(high_words);
        sums[put + 1u] = uintBitsToFloat(rest_words);
        subgroupMemoryBarrierShared();
        subgroupBarrier();
        uvec4 near_pair = floatBitsToUint(sums[get]), far_pair = floatBitsToUint(sums[get + 8u]);
        UNROLL for (uint b = 0u; b < WORDS; ++b) {
            if (b >= v_source.live) continue;
            RIGHT weights;
            PUT(weights, 0, halves(near_pair[b]))
            PUT(weights, 2, halves(far_pair[b]))
#else
        uint from = 4u * t() + g() / 2u;
        bool even = (g() & 1u) == 0u;
        vec2 whole = vec2(w[0], w[1]) * state.norm, high = leading(whole);
        uint high_bits = half_bits_of(rounded(high)), rest_bits = half_bits_of(rounded(whole - high));
        uint bias_pair = bias_bits(v.scale[0].y) | bias_bits(v.scale[1].y) << 16;
        RIGHT weights;
        HALF2 bias[2];
        UNROLL for (uint i = 0u; i < 2u; ++i) {
            uint one = shuffle(high_bits, from + 16u * i), other = shuffle(rest_bits, from + 16u * i);
            PUT(weights, 2 * i, halves(even ? one : other))
            bias[i] = halves(shuffle(bias_pair, from + 16u * i));
        }
        UNROLL for (uint b = 0u; b < WORDS; ++b) {
#endif
            uint x[2], y[2];  // bytes 0 and 1 of both values of a pair, and bytes 2 and 3
            UNROLL for (uint i = 0u; i < 2u; ++i) {
                x[i] = lower_halves(VALUE_WORD(v, 2u * i, b), VALUE_WORD(v, 2u * i + 1u, b));
                y[i] = upper_halves(VALUE_WORD(v, 2u * i, b), VALUE_WORD(v, 2u * i + 1u, b));
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
#if defined(BLOCKS)
            FETCH_VALUE_UNITS(b, j0 + step)
        }
        FETCH_SCALES(v, value_scales, v_source, j0 + step)
#else
        }
        FETCH_VALUES(j0 + step)
#endif
    }
