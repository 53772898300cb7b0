// Softmax in registers, where each four of 32 lanes hold two rows of an accumulator of 16 x 16 whole, as on NVIDIA.
// Component i of lane n is of row n / 4 + 8 (i / 4) and column 8 (i / 2 % 2) + 2 (n % 4) + i % 2, and component i of an
// A operand is the same element. No rule of Vulkan says so: the self-test does.
// Includer must include coopmat.glsl first.
#ifndef VKATTN_WEIGH_QUAD
#define VKATTN_WEIGH_QUAD

const uint STATES = 2u;  // rows of which an invocation holds elements

// One row of the softmax; row_sum is that of the invocation's own keys only.
struct Online {
    float row_max, row_sum;
};
Online no_keys() { return Online(LOWEST, 0.0); }

uint held_row(uint state) { return own_rows() + 8u * state + gl_SubgroupInvocationID / 4u; }
uint held_col(uint i) { return i / 2u % 2u * 8u + gl_SubgroupInvocationID % 4u * 2u + i % 2u; }

// Masks the dot products, then raises the maxima and shrinks the sums of rows that need it.
void begin_tile(uint masking, ScoreRule rule, float scale_2, uint col0, inout SUMS s[KEY_TILES],
                inout SUMS acc[COL_TILES], inout Online online[STATES]) {
    if (masking == BY_PLACE) {
        [[unroll]] for (uint state = 0u; state < STATES; ++state) {
            uint first = score_rows[held_row(state)].begin, end = score_rows[held_row(state)].end;
            [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n)
                [[unroll]] for (uint i = 4u * state; i < 4u * state + 4u; ++i) {
                    uint key = col0 + EDGE * n + held_col(i);
                    if (key < first || key >= end) s[n][i] = uintBitsToFloat(MINUS_INFINITY);
                }
        }
    } else if (masking == BY_RULE) {
        [[unroll]] for (uint state = 0u; state < STATES; ++state) {
            ScoreRow row = score_rows[held_row(state)];
            [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n)
                [[unroll]] for (uint i = 4u * state; i < 4u * state + 4u; ++i)
                    s[n][i] = score_2(s[n][i], rule, row, col0 + EDGE * n + held_col(i));
        }
    }
    float top[STATES];
    bool rises = false;
    [[unroll]] for (uint state = 0u; state < STATES; ++state) {
        top[state] = s[0][4u * state];
        [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n)
            [[unroll]] for (uint i = 4u * state; i < 4u * state + 4u; ++i) top[state] = max(top[state], s[n][i]);
        rises = rises || top[state] * scale_2 > online[state].row_max + SLACK;
    }
    if (!subgroupAny(rises)) return;
    [[unroll]] for (uint state = 0u; state < STATES; ++state) {
        top[state] = max(top[state], subgroupShuffleXor(top[state], 1u));
        top[state] = max(top[state], subgroupShuffleXor(top[state], 2u)) * scale_2;
        float old_max = online[state].row_max, new_max = top[state] > old_max + SLACK ? ceil(top[state]) : old_max;
        float factor = exp2(old_max - new_max);
        online[state] = Online(new_max, online[state].row_sum * factor);
        [[unroll]] for (uint d = 0u; d < COL_TILES; ++d)
            [[unroll]] for (uint i = 4u * state; i < 4u * state + 4u; ++i) acc[d][i] *= factor;
    }
}

// The weights of GROUP matrices of keys from `first`, as operands.
void weigh(uint first, float scale_2, SUMS s[KEY_TILES], inout Online online[STATES],
           out QUERIES p[GROUP * PARTS]) {
    [[unroll]] for (uint n = 0u; n < GROUP; ++n)
        [[unroll]] for (uint i = 0u; i < 8u; ++i) {
            float weight = exp2(fma(s[first + n][i], scale_2, HEADROOM - online[i / 4u].row_max));
            online[i / 4u].row_sum += weight;
            p[n * PARTS][i] = ELEMENT(weight);
#if defined(DTYPE_BF16)
            p[n * PARTS + 1u][i] = ELEMENT(weight - float(ELEMENT(weight)));
#endif
        }
}

void add_not_finite(uint j, uint at, uint quads, inout SUMS acc[COL_TILES]) {
    [[unroll]] for (uint d = 0u; d < COL_TILES; ++d)
        [[unroll]] for (uint i = 0u; i < 8u; ++i) {
            float term = not_finite_term(held_row(i / 4u), d * EDGE + held_col(i), j, at, quads);
            if (term != 0.0) acc[d][i] += term;
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
