// Softmax in registers by the operations of VK_NV_cooperative_matrix2: reductions of rows, functions of elements, and
// accumulators that become operands. The state of a row is a matrix of which each column is the same.
// Includer must include coopmat.glsl first.
#ifndef VKATTN_WEIGH_REDUCE
#define VKATTN_WEIGH_REDUCE

const uint STATES = 1u;

struct Online {
    SUMS row_max, row_sum;  // row_sum holds the sums of every EDGE-th key, to be added in the end
};
Online no_keys() { return Online(SUMS(LOWEST), SUMS(0.0)); }

float larger(const in float a, const in float b) { return max(a, b); }
float sum_of(const in float a, const in float b) { return a + b; }
float masked(const in uint row, const in uint col, const in float dot_product, const in uint row0, const in uint col0) {
    return score_2(dot_product, score_rule(), score_rows[row0 + row], col0 + col);
}
float in_place(const in uint row, const in uint col, const in float dot_product, const in uint row0,
               const in uint col0) {
    bool seen = col0 + col >= score_rows[row0 + row].begin && col0 + col < score_rows[row0 + row].end;
    return seen ? dot_product : uintBitsToFloat(MINUS_INFINITY);
}
float with_term(const in uint row, const in uint col, const in float sum, const in uint row0, const in uint element0,
                const in uint j, const in uint at, const in uint quads) {
    float term = not_finite_term(row0 + row, element0 + col, j, at, quads);
    return term != 0.0 ? sum + term : sum;
}

// Masks the dot products, then raises the maxima and shrinks the sums of rows that need it.
void begin_tile(uint masking, ScoreRule rule, float scale_2, uint col0, inout SUMS s[KEY_TILES],
                inout SUMS acc[COL_TILES], inout Online online[STATES]) {
    if (masking == BY_PLACE) {
        [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n)
            coopMatPerElementNV(s[n], s[n], in_place, own_rows(), col0 + n * EDGE);
    } else if (masking == BY_RULE) {
        [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n)
            coopMatPerElementNV(s[n], s[n], masked, own_rows(), col0 + n * EDGE);
    }
    SUMS top = s[0];
    bool rises = false;
    [[unroll]] for (uint i = 0u; i < top.length(); ++i) {
        [[unroll]] for (uint n = 1u; n < KEY_TILES; ++n) top[i] = max(top[i], s[n][i]);
        rises = rises || top[i] * scale_2 > online[0].row_max[i] + SLACK;
    }
    if (!subgroupAny(rises)) return;
    coopMatReduceNV(top, top, gl_CooperativeMatrixReduceRowNV, larger);
    SUMS factor;
    [[unroll]] for (uint i = 0u; i < top.length(); ++i) {
        float old_max = online[0].row_max[i], new_max = top[i] * scale_2;
        new_max = new_max > old_max + SLACK ? ceil(new_max) : old_max;
        online[0].row_max[i] = new_max;
        factor[i] = exp2(old_max - new_max);
    }
    online[0].row_sum *= factor;
    [[unroll]] for (uint d = 0u; d < COL_TILES; ++d) acc[d] *= factor;
}

// The weights of GROUP matrices of keys from `first`, as operands.
void weigh(uint first, float scale_2, inout SUMS s[KEY_TILES], inout Online online[STATES],
           out QUERIES p[GROUP * PARTS]) {
    [[unroll]] for (uint n = 0u; n < GROUP; ++n) {
        [[unroll]] for (uint i = 0u; i < online[0].row_max.length(); ++i) {
            float weight = exp2(fma(s[first + n][i], scale_2, HEADROOM - online[0].row_max[i]));
            online[0].row_sum[i] += weight;
            s[first + n][i] = weight;
        }
        p[n * PARTS] = QUERIES(s[first + n]);
#if defined(DTYPE_BF16)
        coopmat<ELEMENT, gl_ScopeSubgroup, EDGE, EDGE, gl_MatrixUseAccumulator> high =
            coopmat<ELEMENT, gl_ScopeSubgroup, EDGE, EDGE, gl_MatrixUseAccumulator>(s[first + n]);
        p[n * PARTS + 1u] = QUERIES(s[first + n] - SUMS(high));
#endif
    }
}

void add_not_finite(uint j, uint at, uint quads, inout SUMS acc[COL_TILES]) {
    [[unroll]] for (uint d = 0u; d < COL_TILES; ++d)
        coopMatPerElementNV(acc[d], acc[d], with_term, own_rows(), d * EDGE, j, at, quads);
}

// Ends the subgroup's rows: lse, and what their sums are to be multiplied by in row_factor. May use `stage`.
void end_rows(RowTile tile, Online online[STATES]) {
    uint mine = gl_SubgroupID * 2u * EDGE * OUT_PITCH;
    [[unroll]] for (uint state = 0u; state < STATES; ++state) {
        SUMS sum;
        coopMatReduceNV(sum, online[state].row_sum, gl_CooperativeMatrixReduceRowNV, sum_of);
        subgroupBarrier();
        coopMatStore(online[state].row_max, stage, mine, OUT_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        coopMatStore(sum, stage, mine + EDGE * OUT_PITCH, OUT_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        subgroupBarrier();
        for (uint r = gl_SubgroupInvocationID; r < EDGE; r += gl_SubgroupSize) {
            uint row = own_rows() + state * EDGE + r, at = mine + r * OUT_PITCH;
            row_factor[row] = finish_row(tile, tile.first + row, natural_max(uintBitsToFloat(stage[at].x)),
                                         uintBitsToFloat(stage[at + EDGE * OUT_PITCH].x), (flags() & FLAG_LSE) != 0u);
        }
        subgroupBarrier();
    }
}
#endif
