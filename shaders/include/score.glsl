// From a dot product to a masked score: scale, then softcap, then ALiBi and the mask, then visibility.
// Includer must include params.glsl and tiles.glsl, and define the mask buffer as `uint mask_data[]` and its offset
// push.mask_base.
#ifndef VKATTN_SCORE
#define VKATTN_SCORE

const uint MINUS_INFINITY = 0xFF800000u;

// What is the same for all elements of one query row, read once.
struct ScoreRow {
    uint begin, end;  // the keys that the row sees by position; empty for a row that does not exist
    uint mask_at;     // index of the row's mask element of key 0
    int position;
    float slope;      // ALiBi; 0 is off
};

// What is the same for the whole dispatch.
struct ScoreRule {
    uint mask_kind;  // 0, FLAG_MASK_BITS or FLAG_MASK_FLOAT
    uint mask_step;  // mask elements from key to key: 1, or 0 where one serves all keys
    float scale, softcap;
};

ScoreRule score_rule() {
    return ScoreRule(flags() & (FLAG_MASK_BITS | FLAG_MASK_FLOAT), mask_stride_col(), scale(), softcap());
}

ScoreRow score_row(RowTile tile, uint row) {
    if (row >= tile.rows) return ScoreRow(0u, 0u, 0u, 0, 0.0);
    uint token = row_token(row), h = row_head(tile, row);
    return ScoreRow(key_begin(tile.b, token), key_end(tile.b, token),
                    tile.b * mask_stride_batch() + h * mask_stride_head() + token * mask_stride_row(),
                    q_offset(tile.b) + int(token),
                    (flags() & FLAG_ALIBI) != 0u ? alibi_slope(h) : 0.0);
}

// Whether the row attends the key: by position, and by the mask (a float mask closes with minus infinity only).
bool attended(ScoreRule rule, ScoreRow row, uint key) {
    if (key < row.begin || key >= row.end) return false;
    if (rule.mask_kind == 0u) return true;
    uint index = row.mask_at + key * rule.mask_step;
    if (rule.mask_kind == FLAG_MASK_FLOAT) return mask_data[push.mask_base + index] != MINUS_INFINITY;
    return (mask_data[push.mask_base + (index >> 5)] >> (index & 31u) & 1u) != 0u;
}

// softcap * tanh(s / softcap), off by a few 2^-24 of itself. The built-in tanh may be off by 2^-22 of 1, which a
// softcap far above the scores would multiply. Up to 1.5 it is Lambert's continued fraction, there 4e-10 from tanh.
float capped(float s, float softcap) {
    float x = s / softcap, x2 = x * x;
    if (x2 < 2.25) {
        float numerator = 135135.0 + x2 * (17325.0 + x2 * (378.0 + x2));
        return s * (numerator / (135135.0 + x2 * (62370.0 + x2 * (3150.0 + x2 * 28.0))));
    }
    float t = exp(-2.0 * abs(x));
    float bounded = softcap * ((1.0 - t) / (1.0 + t));
    return s < 0.0 ? -bounded : bounded;
}

// The score of one element that is attended.
float open_score(float dot_product, ScoreRule rule, ScoreRow row, uint key) {
    float s = dot_product * rule.scale;
    if (rule.softcap > 0.0) s = capped(s, rule.softcap);
    if (row.slope != 0.0) s -= row.slope * abs(float(row.position - int(key)));
    if (rule.mask_kind == FLAG_MASK_FLOAT)
        s += uintBitsToFloat(mask_data[push.mask_base + row.mask_at + key * rule.mask_step]);
    return s;
}

// The score of one element, or minus infinity where it is not attended; `dot_product` is not used then (may be NaN).
float masked_score(float dot_product, ScoreRule rule, ScoreRow row, uint key) {
    if (!attended(rule, row, key)) return uintBitsToFloat(MINUS_INFINITY);
    return open_score(dot_product, rule, row, key);
}

// Whether every row of a run sees all keys of [first, last] and nothing but the scale applies.
bool is_plain(ScoreRule rule, ScoreRow row, uint first, uint last) {
    return rule.mask_kind == 0u && rule.softcap == 0.0 && row.slope == 0.0 && first >= row.begin && last < row.end;
}
#endif
