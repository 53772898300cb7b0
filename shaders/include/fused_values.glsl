// Weights x values of attn_fused: values staged through v_tile, products summed tile by tile.
// Includer must define THREADS, UNROLLED, ROLLED, COMPENSATED, the sizes V_KEYS, V_LOADS, BLOCK_VECS, OUT_X, OUT_ROWS,
// OUT_VECS and P_PITCH, and the shared stage (weights), v_tile, row_factor and dirty_stamp; and include fused.glsl,
// fused_places.glsl and fused_dots.glsl.
#ifndef VKATTN_FUSED_VALUES
#define VKATTN_FUSED_VALUES

#if defined(KEY_QUANTISED)
#define load_value read_value
#else
#define load_value(place, d) value[(place) + (d)]
#endif
#define VALUES KEYS

// Reads this invocation's part of vecs [e0, e0 + vecs) of the values of keys [key0, end), as far as there is room;
// beyond the end, the last key's again, which weigh nothing.
VALUES[V_LOADS] fetch_values(uint value_at, uint value_row, uint key0, uint end, uint e0, uint vecs) {
    VALUES v[V_LOADS];
    [[unroll]] for (uint i = 0u; i < V_LOADS; ++i) {
        uint at = gl_LocalInvocationIndex + THREADS * i, e = at % BLOCK_VECS;
        uint j = min(key0 + at / BLOCK_VECS, end - 1u);
        v[i] = VALUES(0);
        if (e < vecs) v[i] = load_value(value_at + j * value_row, e0 + e);
    }
    return v;
}

// Stages them as floats; `block` marks one that is not finite.
void stage_values(VALUES v[V_LOADS], uint block) {
    [[unroll]] for (uint i = 0u; i < V_LOADS; ++i) {
        vec4 floats = key_floats(v[i]);
        v_tile[gl_LocalInvocationIndex + THREADS * i] = floats;
        if (any(not_finite(floats))) dirty_stamp = block;
    }
}

// Adds the staged keys' part of the output; j0 is their place in the tile. Both forms round alike, so that the result
// does not depend on whether something that nobody attends is finite.
void add_product(inout vec4 sum[OUT_ROWS * OUT_VECS], uint num_keys, uint j0, uint x, uint y) {
    if (num_keys == 0u) return;
    UNROLLED for (uint j = 0u; j < V_KEYS; j += 4u) {
        vec4 v[4u * OUT_VECS];
        [[unroll]] for (uint i = 0u; i < 4u; ++i)
            [[unroll]] for (uint e = 0u; e < OUT_VECS; ++e)
                v[i * OUT_VECS + e] = v_tile[(j + i) * BLOCK_VECS + OUT_X * e + x];
        [[unroll]] for (uint i = 0u; i < OUT_ROWS; ++i) {
            vec4 p = stage[(OUT_LEAP * y + OUT_STEP * i) * P_PITCH + (j0 + j) / 4u];
            [[unroll]] for (uint e = 0u; e < OUT_VECS; ++e) {
                vec4 s = sum[i * OUT_VECS + e];
                s = fma(vec4(p.x), v[e], s);
                s = fma(vec4(p.y), v[OUT_VECS + e], s);
                s = fma(vec4(p.z), v[2u * OUT_VECS + e], s);
                sum[i * OUT_VECS + e] = fma(vec4(p.w), v[3u * OUT_VECS + e], s);
            }
        }
    }
}

// The same where a value is not finite (rare): a weight of 0 must not meet it.
void add_selected(inout vec4 sum[OUT_ROWS * OUT_VECS], uint num_keys, uint j0, uint x, uint y) {
    ROLLED for (uint j = 0u; j < num_keys; ++j) {
        [[unroll]] for (uint i = 0u; i < OUT_ROWS; ++i) {
            float p = stage[(OUT_LEAP * y + OUT_STEP * i) * P_PITCH + (j0 + j) / 4u][j % 4u];
            [[unroll]] for (uint e = 0u; e < OUT_VECS; ++e) {
                vec4 s = fma(vec4(p), v_tile[j * BLOCK_VECS + OUT_X * e + x], sum[i * OUT_VECS + e]);
                if (p != 0.0) sum[i * OUT_VECS + e] = s;
            }
        }
    }
}

void add_values(inout vec4 sum[OUT_ROWS * OUT_VECS], bool busy, bool dirty, uint j0, uint x, uint y) {
    if (MAY_IDLE) {
        add_product(sum, only_if(busy && !dirty, V_KEYS), j0, x, y);
        add_selected(sum, only_if(busy && dirty, V_KEYS), j0, x, y);
    } else if (!dirty) {
        add_product(sum, V_KEYS, j0, x, y);
    } else {
        add_selected(sum, V_KEYS, j0, x, y);
    }
}

// acc = acc * row_factor + part; what a factor of 0 wipes out may be infinite.
void accumulate_plain(inout vec4 acc[OUT_ROWS * OUT_VECS], vec4 part[OUT_ROWS * OUT_VECS], uint y) {
    [[unroll]] for (uint i = 0u; i < OUT_ROWS; ++i) {
        float factor = row_factor[OUT_LEAP * y + OUT_STEP * i];
        [[unroll]] for (uint e = 0u; e < OUT_VECS; ++e) {
            uint n = i * OUT_VECS + e;
            acc[n] = (factor == 0.0 ? vec4(0.0) : acc[n] * factor) + part[n];
        }
    }
}

// The same, compensated by `lost`.
void accumulate_compensated(inout vec4 acc[OUT_ROWS * OUT_VECS], inout vec4 lost[OUT_ROWS * OUT_VECS],
                            vec4 part[OUT_ROWS * OUT_VECS], uint y) {
    [[unroll]] for (uint i = 0u; i < OUT_ROWS; ++i) {
        float factor = row_factor[OUT_LEAP * y + OUT_STEP * i];
        [[unroll]] for (uint e = 0u; e < OUT_VECS; ++e) {
            uint n = i * OUT_VECS + e;
            precise vec4 old = factor == 0.0 ? vec4(0.0) : acc[n] * factor;
            precise vec4 term = part[n] - lost[n] * factor;
            precise vec4 next = old + term;
            precise vec4 rounded = (next - old) - term;
            lost[n] = mix(vec4(0.0), rounded, lessThan(abs(next), vec4(3.4e38)));  // no NaN from infinities
            acc[n] = next;
        }
    }
}

// Rows of many keys need what rounding takes from them: without, a sum of n parts is off by up to n 2^-25 of itself.
// The choice is made once, not for each vec: branches in a row made SwiftShader's compiler take all memory.
void accumulate(inout vec4 acc[OUT_ROWS * OUT_VECS], inout vec4 lost[OUT_ROWS * OUT_VECS],
                vec4 part[OUT_ROWS * OUT_VECS], uint y) {
    if (COMPENSATED == 0u) accumulate_plain(acc, part, y);
    else accumulate_compensated(acc, lost, part, y);
}
#endif
