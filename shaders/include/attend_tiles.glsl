// The tiles of attend_matrices.glsl, in its function, for one kind of scores: PLAIN says whether the scale is all.
    for (; j0 < end; j0 += step) {
        if (PLAIN) {
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
#if defined(X_NOK)
        next[0] = s[0] + uintBitsToFloat(k.scale[0].x); next[1] = s[1];
        X_LOAD(k = fetch_keys(k_source, j0 + 2u * step, end);)
#elif !defined(X_LATE)
        SCORES(next)
        X_LOAD(k = fetch_keys(k_source, j0 + 2u * step, end);)
#endif
        float p[2], w[2 * WEIGHTS], largest;
        WEIGH
#if defined(X_NOVOTE)
        if (j0 == begin) {
#else
        if (any_of(max(s[0], s[1]) > state.row_max || largest > state.limit)) {
#endif
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
            uint high_bits = half_bits_of(rounded(high)), rest_bits = half_bits_of(rounded(whole - high));
            bool gives_high = (g() & 4u) == 0u;
            uint one = shuffle(gives_high ? high_bits : rest_bits, near);
            uint other = shuffle(gives_high ? rest_bits : high_bits, far);
            RIGHT weights;
            PUT(weights, 0, halves(even ? one : other))
            PUT(weights, 2, halves(even ? other : one))
#else
        vec2 whole = vec2(w[0], w[1]) * state.norm, high = leading(whole);
        uint high_bits = half_bits_of(rounded(high)), rest_bits = half_bits_of(rounded(whole - high));
        RIGHT weights;
        uint bias_pair = 0x80008000u | bias_bits(v.scale[0].y) | bias_bits(v.scale[1].y) << 16;
        UNROLL for (uint i = 0u; i < 2u; ++i) {
            HALF2 own_bias = halves(shuffle(bias_pair, from + 16u * i));
            PUT(bias, 2u * i, own_bias)
            PUT(bias, 2u * i + 4u, own_bias)
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
#if defined(X_NOV)
            PART(acc[2u * b], 0) += uintBitsToFloat(x[0] ^ x[1] ^ y[0] ^ y[1]) + float(PART(weights, 0)) + float(PART(weights, 2));
#else
            LEFT first, second;
            PUT(first, 0, VALUE_CODES(x[0]))
            PUT(first, 2, VALUE_CODES(x[1]))
            PUT(first, 4, VALUE_CODES(x[0] >> 8))
            PUT(first, 6, VALUE_CODES(x[1] >> 8))
            acc[2u * b] = multiply_add(first, weights, multiply_add(bias, weights, acc[2u * b]));
            PUT(second, 0, VALUE_CODES(y[0]))
            PUT(second, 2, VALUE_CODES(y[1]))
            PUT(second, 4, VALUE_CODES(y[0] >> 8))
            PUT(second, 6, VALUE_CODES(y[1] >> 8))
            acc[2u * b + 1u] = multiply_add(second, weights, multiply_add(bias, weights, acc[2u * b + 1u]));
#endif
        }
        X_LOAD(v = fetch_values(v_source, j0 + step, end);)
#if defined(X_LATE)
        SCORES(next)
        X_LOAD(k = fetch_keys(k_source, j0 + 2u * step, end);)
#endif
        s = next;
    }
