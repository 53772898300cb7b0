// The end of a split where rows of keys are shared by LANES invocations: the states and sums of all lane groups become
// those of the workgroup, as a part or, where there is one split, as the result.
// Includer must include split.glsl, define THREADS, USED_ROWS, ROWS, LANES, VECS, RUN (LANES * VECS), a struct State and
//   float own_max(State state, uint r)   of row r, what the invocation's acc is relative to
//   uint vec_index(uint i)               which vec of the row is vec i of the invocation
//   vec4 acc_factor(uint i)              by which its acc is to be multiplied
// and have, in shared memory, sums[ALL_SUMS] and group_state, into which it has put each subgroup's state of each row.
#ifndef VKATTN_FINISH_ROWS
#define VKATTN_FINISH_ROWS

// (row_max, row_sum) of row r over the workgroup.
vec2 row_state(uint r) {
    vec2 whole = vec2(LOWEST, 0.0);
    for (uint g = 0u; g < gl_NumSubgroups; ++g) whole.x = max(whole.x, group_state[g * ROWS + r].x);
    for (uint g = 0u; g < gl_NumSubgroups; ++g)
        whole.y = fma(group_state[g * ROWS + r].y, exp(group_state[g * ROWS + r].x - whole.x), whole.y);
    return whole;
}

// Sum rows over the lane groups of each subgroup, and put a RUN for each subgroup and row into sums.
void gather_rows(uint first, uint stop, State state, vec4 acc[ROWS * VECS]) {
    // A loop, with all but the choice of acc in it once: unrolled, it took more compiling than all the rest.
    [[dont_unroll]] for (uint r = first; r < stop; ++r) {
        vec4 mine[VECS];
        [[unroll]] for (uint k = 0u; k < ROWS; ++k)
            if (k < USED_ROWS && k == r)
                [[unroll]] for (uint i = 0u; i < VECS; ++i) mine[i] = acc[k * VECS + i];
        float row_max = LOWEST;
        for (uint g = 0u; g < gl_NumSubgroups; ++g) row_max = max(row_max, group_state[g * ROWS + r].x);
        float factor = exp(own_max(state, r) - row_max);
        [[unroll]] for (uint i = 0u; i < VECS; ++i) {
            vec4 sum = mine[i] * factor * acc_factor(i);
            for (uint step = LANES; step < gl_SubgroupSize; step *= 2u) sum += subgroupShuffleXor(sum, step);
            if (gl_SubgroupInvocationID < LANES)
                sums[((r - first) * gl_NumSubgroups + gl_SubgroupID) * RUN + vec_index(i)] = sum;
        }
    }
}

// By the whole workgroup; as many rows at once as sums has room for.
void finish_rows(RowTile tile, uint item, uint split, State state, vec4 acc[ROWS * VECS]) {
    uint rows = min(USED_ROWS, tile.rows - tile.first), at_once = ALL_SUMS / (gl_NumSubgroups * RUN);
    bool is_whole = num_splits() == 1u;
    uint vecs = is_whole ? out_vecs() : value_vecs();
    for (uint first = 0u; first < rows; first += at_once) {
        uint stop = min(first + at_once, rows);
        gather_rows(first, stop, state, acc);
        barrier();
        for (uint n = gl_LocalInvocationIndex; n < (stop - first) * vecs; n += THREADS) {
            uint r = first + n / vecs, e = n % vecs;
            vec2 whole = row_state(r);
            vec4 sum = vec4(0.0);
            if (e < value_vecs())
                for (uint g = 0u; g < gl_NumSubgroups; ++g)
                    sum += sums[((r - first) * gl_NumSubgroups + g) * RUN + e];
            if (is_whole) write_out(tile, tile.first + r, e, sum, whole);
            else parts[part_index(item, split, r) + 1u + e] = sum;
            if (e == 0u && is_whole) write_lse(tile, tile.first + r, whole);
            else if (e == 0u) parts[part_index(item, split, r)] = vec4(whole, 0.0, 0.0);
        }
        if (stop < rows) barrier();
    }
}
#endif
