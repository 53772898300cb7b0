// New rows of keys and values into the cache, by the invocations that are about to read them: decode in one dispatch.
// Includer must include params.glsl and tiles.glsl, and define QUERY, query_vec, key_words, QUAD_VECS, LANES, QUADS and
// the functions lane, lane_group and lane_groups (a power of two), the buffers new_key and new_value (QUERY) and, as
// second views of those of keys and values, key_rows and value_rows (KEY_ROWS).
#ifndef VKATTN_APPEND
#define VKATTN_APPEND

#define APPEND_VECS(rows, to, new_rows, from, row_vecs, vecs)                                     \
    [[unroll]] for (uint i = 0u; i < QUADS * QUAD_VECS; ++i) {                                    \
        uint e = ((i / QUAD_VECS) * LANES + lane()) * QUAD_VECS + i % QUAD_VECS;                  \
        if (e >= (row_vecs)) continue;                                                            \
        vec4 x = vec4(0.0);                                                                       \
        if (e < (vecs)) x = query_vec(new_rows[(from) + e]);                                      \
        rows[(to) + e] = key_words(x);                                                            \
    }

// Write those of the new rows that lie in [begin, end), or all of them. Row j is written by the lane group that would
// read it, and each of its quads by the invocation that would: so nobody waits. Workgroups that share a row write the
// same.
void append_rows(RowTile tile, uint begin, uint end, bool is_all) {
    uint oldest = input_pos(tile.b), first = oldest, stop = kv_len(tile.b), groups = lane_groups();
    if (!is_all) {
        first = max(first, begin);
        stop = min(stop, end);
    }
    uint k_from = push.new_key_base + tile.b * new_k_stride_batch() + tile.hk * new_k_stride_head();
    uint v_from = push.new_value_base + tile.b * new_v_stride_batch() + tile.hk * new_v_stride_head();
    uint k_to = push.key_base + key_offset() + tile.b * k_stride_batch() + tile.hk * k_stride_head();
    uint v_to = push.value_base + value_offset() + tile.b * v_stride_batch() + tile.hk * v_stride_head();
    [[dont_unroll]] for (uint j = first + (begin + lane_group() - first & groups - 1u); j < stop; j += groups) {
        APPEND_VECS(key_rows, k_to + j * k_stride_row(), new_key, k_from + (j - oldest) * new_k_stride_row(),
                    k_stride_row(), head_vecs())
        APPEND_VECS(value_rows, v_to + j * v_stride_row(), new_value, v_from + (j - oldest) * new_v_stride_row(),
                    v_stride_row(), value_vecs())
    }
    // They are read by another name, which a compiler need not know to be the same. (Within the loop, where invocations
    // part, lavapipe computed nonsense.)
    if (first < stop) memoryBarrierBuffer();
}
#endif
