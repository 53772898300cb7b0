// What the fused kernels share: their push constants, buffers, limits, and the order of their row tiles.
// Includer must define BLOCK_ROWS, and the dtypes by QUERY_* and KEY_*; values have the dtype of the keys.
#ifndef VKATTN_FUSED
#define VKATTN_FUSED

layout(push_constant) uniform Push {
    uint params_base;
    uint chunk;
    uint query_base;
    uint key_base;
    uint value_base;
    uint mask_base;
    uint out_base;
    uint lse_base;
} push;

#include "query_out.glsl"
#include "key_format.glsl"

#include "params.glsl"
layout(set = 0, binding = 1) restrict readonly buffer Query { QUERY query[]; };
layout(set = 0, binding = 2) restrict readonly buffer Key { KEY key[]; };
layout(set = 0, binding = 3) restrict readonly buffer Value { KEY value[]; };
layout(set = 0, binding = 4) restrict readonly buffer Mask { uint mask_data[]; };
layout(set = 0, binding = 5) coherent writeonly buffer Out { QUERY outputs[]; };
layout(set = 0, binding = 6) coherent writeonly buffer Lse { float lse[]; };
#include "read_query.glsl"
#include "write_out.glsl"
#include "key_rows.glsl"
#include "value_rows.glsl"
#include "tiles.glsl"
#include "score.glsl"

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

// A software device runs both sides of an `if`, but a loop only as often as it must: what is rare goes into a loop.
uint only_if(bool wanted, uint times) { return wanted ? times : 0u; }

// Which components are infinite or NaN.
bvec4 not_finite(vec4 v) { return equal(floatBitsToUint(v) & 0x7F800000u, uvec4(0x7F800000u)); }

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
