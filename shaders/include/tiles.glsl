// Where a tile of query rows lies, and which keys its rows see.
//
// The group_size query heads of one KV head share its keys, so their rows form one matrix: row r of KV head hk is
// token r / group_size of query head hk * group_size + r % group_size. Tokens ascend with r, so the keys that a run of
// rows sees are bounded by those of its first and last row. A row tile is BLOCK_ROWS such rows of one (batch, KV head);
// row tiles are numbered over the heads and the batch.
//
// Query token l of batch b stands at position q_offset(b) + l and sees keys [key_begin, key_end): kv_len(b) and the
// window bound them; a causal mask is a window whose right side is 0.
// Includer must include params.glsl first.
#ifndef VKATTN_TILES
#define VKATTN_TILES

#ifndef BLOCK_ROWS
#define BLOCK_ROWS 32u  // the three passes; other kernels define their own before
#endif

struct RowTile {
    uint b;      // batch
    uint hk;     // KV head
    uint first;  // first row in the tile
    uint rows;   // rows of this (batch, KV head): q_len * group_size
};

uint row_tiles_per_head() { return (q_len() * group_size() + BLOCK_ROWS - 1u) / BLOCK_ROWS; }
uint num_row_tiles() { return batch_size() * num_kv_heads() * row_tiles_per_head(); }

RowTile row_tile(uint index) {
    uint per_head = row_tiles_per_head();
    uint head = index / per_head;
    RowTile tile;
    tile.b = head / num_kv_heads();
    tile.hk = head % num_kv_heads();
    tile.first = (index % per_head) * BLOCK_ROWS;
    tile.rows = q_len() * group_size();
    return tile;
}

uint row_token(uint row) { return row / group_size(); }
uint row_head(RowTile tile, uint row) { return tile.hk * group_size() + row % group_size(); }

uint key_end(uint b, uint token) {
    int end = q_offset(b) + int(token) + window_right() + 1;
    return uint(clamp(end, 0, int(kv_len(b))));
}
uint key_begin(uint b, uint token) {
    int begin = q_offset(b) + int(token) - window_left();
    return uint(clamp(begin, 0, int(kv_len(b))));
}
// Both at once, [x, y); y is 0 if the token sees nothing.
uvec2 key_range(uint b, uint token) {
    uvec2 range = uvec2(key_begin(b, token), key_end(b, token));
    return range.x < range.y ? range : uvec2(0u);
}
uint tile_key_begin(RowTile tile) { return key_begin(tile.b, row_token(tile.first)); }
uint tile_key_end(RowTile tile) {
    return key_end(tile.b, row_token(min(tile.first + BLOCK_ROWS, tile.rows) - 1u));
}
#endif
