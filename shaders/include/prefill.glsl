// What the prefill kernels share: limits, the order of their row tiles, where a row lies, and how one ends.
// Includer must define BLOCK_ROWS, the push constants query_base, out_base and lse_base, the buffer `float lse[]`, and
// include params.glsl, tiles.glsl and score.glsl.
#ifndef VKATTN_PREFILL
#define VKATTN_PREFILL

const float HIGHEST_SUM = 1.0e30;    // far beyond any number of keys: e^NaN may be infinity, and so may ln NaN
const float LOWEST = -3.4028235e38;  // row_max starts finite: a score of minus infinity less it is never NaN
const uint NOT_A_NUMBER = 0x7FC00000u;

// Row tiles with the highest rows come first, because under a causal mask they see the most keys.
RowTile heaviest_first(uint index) {
    uint heads = batch_size() * num_kv_heads(), per_head = row_tiles_per_head();
    return row_tile(index % heads * per_head + (per_head - 1u - index / heads));
}

// Where in the query, and in the output, a row starts.
uint query_row(RowTile tile, uint row) {
    return push.query_base + tile.b * q_stride_batch() + row_head(tile, row) * q_stride_head()
           + row_token(row) * q_stride_row();
}
uint out_row(RowTile tile, uint row) {
    return push.out_base + tile.b * out_stride_batch() + row_head(tile, row) * out_stride_head()
           + row_token(row) * out_stride_row();
}

// Ends a row: takes the sink in, writes lse if `write_lse`, returns what the row's sums are to be multiplied by.
float finish_row(RowTile tile, uint row, float row_max, float row_sum, bool write_lse) {
    uint h = row_head(tile, row), token = row_token(row);
    float factor = 1.0;
    if (row < tile.rows && (flags() & FLAG_SINKS) != 0u) {
        float s = sink(h), top = max(row_max, s);
        factor = exp(row_max - top);
        row_sum = row_sum * factor + exp(s - top);
        row_max = top;
    }
    bool empty = row_sum == 0.0, finite = row_sum < HIGHEST_SUM;
    if (row < tile.rows && write_lse) {
        uint lse_row = (q_len() + 3u) & ~3u;
        uint index = push.lse_base + (tile.b * num_kv_heads() * group_size() + h) * lse_row + token;
        float whole = finite ? row_max + log(row_sum) : uintBitsToFloat(NOT_A_NUMBER);
        lse[index] = empty ? uintBitsToFloat(MINUS_INFINITY) : whole;
        for (uint pad = token + 1u; token + 1u == q_len() && pad < lse_row; ++pad) lse[index + pad - token] = 0.0;
    }
    if (empty) return 0.0;
    return finite ? factor / row_sum : uintBitsToFloat(NOT_A_NUMBER);
}
#endif
