// Softmax in registers, where each four of 32 lanes hold two rows of an accumulator of 16 x 16 whole, as on NVIDIA.
// Component i of lane n is of row n / 4 + 8 (i / 4) and column 8 (i / 2 % 2) + 2 (n % 4) + i % 2, and component i of an
// A operand is the same element. No rule of Vulkan says so: the self-test does.
// Includer must include coopmat.glsl first.
#ifndef VKATTN_WEIGH_QUAD
#define VKATTN_WEIGH_QUAD

const uint STATES = 2u * ROW_TILES;  // rows of which an invocation holds elements

// One row of the softmax; row_sum is that of the invocation's own keys only.
struct Online {
    float row_max, row_sum;
};
Online no_keys() { return Online(LOWEST, 0.0); }

uint held_row(uint state) {
    return own_rows() + EDGE * (state / 2u) + 8u * (state % 2u) + gl_SubgroupInvocationID / 4u;
}
uint held_col(uint i) { return i / 2u % 2u * 8u + gl_SubgroupInvocationID % 4u * 2u + i % 2u; }

// Turns dot products into weights, and shrinks the sums by the step from the old maximum to the new one.
void weigh(bool plain, ScoreRule rule, uint col0, inout SUMS s[ROW_TILES * KEY_TILES],
           inout SUMS acc[ROW_TILES * COL_TILES], inout Online online[STATES],
           out QUERIES p[ROW_TILES * KEY_TILES * PARTS]) {
    float scale_2 = plain ? rule.scale * LOG2_E : 1.0;
    if (!plain) {
        [[unroll]] for (uint state = 0u; state < STATES; ++state) {
            ScoreRow row = score_rows[held_row(state)];
            [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n)
                [[unroll]] for (uint i = 4u * (state % 2u); i < 4u * (state % 2u) + 4u; ++i) {
                    uint at = state / 2u * KEY_TILES + n;
                    s[at][i] = score_2(s[at][i], rule, row, col0 + EDGE * n + held_col(i));
                }
        }
    }
    float factor[STATES];
    bool changed = false;
    [[unroll]] for (uint state = 0u; state < STATES; ++state) {
        float top = s[state / 2u * KEY_TILES][4u * (state % 2u)];
        [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n)
            [[unroll]] for (uint i = 4u * (state % 2u); i < 4u * (state % 2u) + 4u; ++i)
                top = max(top, s[state / 2u * KEY_TILES + n][i]);
        top = max(top, subgroupShuffleXor(top, 1u));
        top = max(top, subgroupShuffleXor(top, 2u));
        float old_max = online[state].row_max, new_max = max(old_max, top * scale_2), shift = HEADROOM - new_max;
        float sum = 0.0;
        [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n)
            [[unroll]] for (uint i = 4u * (state % 2u); i < 4u * (state % 2u) + 4u; ++i) {
                uint at = state / 2u * KEY_TILES + n;
                float weight = exp2(fma(s[at][i], scale_2, shift));
                sum += weight;
                p[at * PARTS][i] = ELEMENT(weight);
#if defined(DTYPE_BF16)
                p[at * PARTS + 1u][i] = ELEMENT(weight - float(ELEMENT(weight)));
#endif
            }
        factor[state] = exp2(old_max - new_max);
        changed = changed || factor[state] != 1.0;
        online[state] = Online(new_max, fma(online[state].row_sum, factor[state], sum));
    }
    if (subgroupAny(changed)) {
        [[unroll]] for (uint n = 0u; n < ROW_TILES * COL_TILES; ++n)
            [[unroll]] for (uint i = 0u; i < 8u; ++i) acc[n][i] *= factor[n / COL_TILES * 2u + i / 4u];
    }
}

void add_not_finite(uint j, uint at, uint quads, inout SUMS acc[ROW_TILES * COL_TILES]) {
    [[unroll]] for (uint n = 0u; n < ROW_TILES * COL_TILES; ++n)
        [[unroll]] for (uint i = 0u; i < 8u; ++i) {
            float term = not_finite_term(held_row(n / COL_TILES * 2u + i / 4u), n % COL_TILES * EDGE + held_col(i), j,
                                         at, quads);
            if (term != 0.0) acc[n][i] += term;
        }
}

// Ends the subgroup's rows: lse, and what their sums are to be multiplied by in row_factor. May use `stage`.
void end_rows(RowTile tile, Online online[STATES]) {
    [[unroll]] for (uint state = 0u; state < STATES; ++state) {
        float sum = online[state].row_sum;
        sum += subgroupShuffleXor(sum, 1u);
        sum += subgroupShuffleXor(sum, 2u);
        if (gl_SubgroupInvocationID % 4u == 0u)
            row_factor[held_row(state)] = finish_row(tile, tile.first + held_row(state),
                                                     natural_max(online[state].row_max), sum,
                                                     (flags() & FLAG_LSE) != 0u);
    }
}
#endif
