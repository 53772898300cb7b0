// New rows of keys and values into the cache, by the workgroups that are about to read them: decode in one dispatch.
// Includer must include params.glsl and tiles.glsl, and define THREADS, QUERY, query_vec and key_words, the buffers
// new_key and new_value (QUERY) and, as second views of those of keys and values, key_rows and value_rows (KEY_ROWS).
#ifndef VKATTN_APPEND
#define VKATTN_APPEND

// Write those of the new rows that lie in [begin, end), or all of them. Workgroups that share a row write the same.
void append_rows(RowTile tile, uint begin, uint end, bool is_all) {
    uint first = input_pos(tile.b), stop = kv_len(tile.b);
    if (!is_all) {
        first = max(first, begin);
        stop = min(stop, end);
    }
    if (first >= stop) return;
    uint k_vecs = k_stride_row(), v_vecs = v_stride_row(), skipped = first - input_pos(tile.b);
    uint k_from = push.new_key_base + tile.b * new_k_stride_batch() + tile.hk * new_k_stride_head();
    uint v_from = push.new_value_base + tile.b * new_v_stride_batch() + tile.hk * new_v_stride_head();
    uint k_to = push.key_base + key_offset() + tile.b * k_stride_batch() + tile.hk * k_stride_head();
    uint v_to = push.value_base + value_offset() + tile.b * v_stride_batch() + tile.hk * v_stride_head();
    for (uint i = gl_LocalInvocationIndex; i < (stop - first) * k_vecs; i += THREADS) {
        uint row = i / k_vecs, e = i % k_vecs;
        vec4 x = vec4(0.0);
        if (e < head_vecs()) x = query_vec(new_key[k_from + (skipped + row) * new_k_stride_row() + e]);
        key_rows[k_to + (first + row) * k_vecs + e] = key_words(x);
    }
    for (uint i = gl_LocalInvocationIndex; i < (stop - first) * v_vecs; i += THREADS) {
        uint row = i / v_vecs, e = i % v_vecs;
        vec4 x = vec4(0.0);
        if (e < value_vecs()) x = query_vec(new_value[v_from + (skipped + row) * new_v_stride_row() + e]);
        value_rows[v_to + (first + row) * v_vecs + e] = key_words(x);
    }
    memoryBarrierBuffer();
    barrier();
}
#endif
