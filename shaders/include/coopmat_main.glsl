// The loop of the kernels on matrix units: queries, tiles of keys and values, outputs.
// Includer must include coopmat.glsl and one of weigh_quad.glsl, weigh_shared.glsl, weigh_reduce.glsl first.

// Takes tile.first + [0, BLOCK_ROWS) into the registers of the subgroups, by way of `stage`.
void load_queries(RowTile tile, uint quads, out QUERIES q[ROW_TILES * COL_TILES]) {
    [[unroll]] for (uint m = 0u; m < ROW_TILES; ++m)
        for (uint g = 0u; g < SUBGROUPS; g += QUERY_SUBGROUPS) {
            for (uint i = gl_LocalInvocationIndex; i < QUERY_SUBGROUPS * EDGE * ROW_QUADS; i += THREADS) {
                uint place = i / ROW_QUADS, quad = i % ROW_QUADS;
                uint row = tile.first + ((g + place / EDGE) * ROW_TILES + m) * EDGE + place % EDGE;
                bool live = row < tile.rows && quad < quads;
                stage[place * PITCH + quad] = live ? query[query_row(tile, row) / 2u + quad] : uvec4(0u);
            }
            barrier();
            if (gl_SubgroupID / QUERY_SUBGROUPS == g / QUERY_SUBGROUPS) {
                [[unroll]] for (uint d = 0u; d < COL_TILES; ++d)
                    coopMatLoad(q[m * COL_TILES + d], stage,
                                gl_SubgroupID % QUERY_SUBGROUPS * EDGE * PITCH + d * EDGE_QUADS, PITCH,
                                gl_CooperativeMatrixLayoutRowMajor);
            }
            barrier();
        }
}

// Loads the invocation's quads of the rows [col0, end) of a tile; 0 beyond.
#define FETCH(held, rows_of, at, step, col0, end, quads)                                    \
    [[unroll]] for (uint i = 0u; i < FETCHES; ++i) {                                        \
        uint n = gl_LocalInvocationIndex + THREADS * i, j = (col0) + n / ROW_QUADS;         \
        bool live = j < (end) && n % ROW_QUADS < (quads) && n < TILE_QUADS;                 \
        held[i] = live ? rows_of[(at) + j * (step) + n % ROW_QUADS] : uvec4(0u);            \
    }

void stash(uvec4 held[FETCHES], uint at) {
    [[unroll]] for (uint i = 0u; i < FETCHES; ++i) {
        uint n = gl_LocalInvocationIndex + THREADS * i;
        if (TILE_QUADS % THREADS == 0u || n < TILE_QUADS)
            stage[at + n / ROW_QUADS * PITCH + n % ROW_QUADS] = held[i];
    }
}

// The same for values. In a tile that not every row sees whole (`plain` is false) what is not finite is left out and
// its key noted; for weights in two parts too, as infinity times a second part of 0 is NaN.
void stash_values(uvec4 held[FETCHES], bool plain, uint turn) {
    if (plain && PARTS == 1u) {
        stash(held, STAGE);
        return;
    }
    [[unroll]] for (uint i = 0u; i < FETCHES; ++i) {
        uint n = gl_LocalInvocationIndex + THREADS * i, j = n / ROW_QUADS;
        if (n >= TILE_QUADS) continue;
        stage[STAGE + j * PITCH + n % ROW_QUADS] = only_finite(held[i]);
        if (not_finite(held[i]) != 0u) atomicOr(dirty_keys[turn % 2u * DIRTY_WORDS + j / 32u], 1u << (j % 32u));
    }
}

// The products of the subgroup's queries with the staged keys.
void multiply_keys(QUERIES q[ROW_TILES * COL_TILES], out SUMS s[ROW_TILES * KEY_TILES]) {
    [[unroll]] for (uint n = 0u; n < ROW_TILES * KEY_TILES; ++n) s[n] = SUMS(0.0);
    [[unroll]] for (uint d = 0u; d < COL_TILES; ++d)
        [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n) {
            KEYS k;
            coopMatLoad(k, stage, n * EDGE * PITCH + d * EDGE_QUADS, PITCH,
                        gl_CooperativeMatrixLayoutColumnMajor);
            [[unroll]] for (uint m = 0u; m < ROW_TILES; ++m)
                s[m * KEY_TILES + n] = coopMatMulAdd(q[m * COL_TILES + d], k, s[m * KEY_TILES + n]);
        }
}

// Adds the weighted staged values to the sums.
void add_values(QUERIES p[ROW_TILES * KEY_TILES * PARTS], inout SUMS acc[ROW_TILES * COL_TILES]) {
    [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n)
        [[unroll]] for (uint d = 0u; d < COL_TILES; ++d) {
            KEYS v;
            coopMatLoad(v, stage, STAGE + n * EDGE * PITCH + d * EDGE_QUADS, PITCH,
                        gl_CooperativeMatrixLayoutRowMajor);
            [[unroll]] for (uint m = 0u; m < ROW_TILES; ++m)
                [[unroll]] for (uint low = 0u; low < PARTS; ++low)
                    acc[m * COL_TILES + d] = coopMatMulAdd(p[(m * KEY_TILES + n) * PARTS + low], v,
                                                           acc[m * COL_TILES + d]);
        }
}

// Adds what was left out of the values of the tile at col0 to the rows that attend it (rare).
void add_all_not_finite(uint col0, uint at, uint step, uint quads, uint turn, inout SUMS acc[ROW_TILES * COL_TILES]) {
    for (uint w = 0u; w < DIRTY_WORDS; ++w)
        for (uint dirty = dirty_keys[turn % 2u * DIRTY_WORDS + w]; dirty != 0u; dirty &= dirty - 1u) {
            uint j = col0 + 32u * w + uint(findLSB(dirty));
            add_not_finite(j, at + j * step, quads, acc);
        }
}

// Whether all rows of the row tile see all keys of the tile at col0 by position.
bool is_seen_whole(uint col0, uint all_begin, uint all_end) {
    return col0 >= all_begin && col0 + BLOCK_KEYS <= all_end;
}

// Writes the rows of the subgroup, a matrix at a time by way of `stage`.
void write_rows(RowTile tile, SUMS acc[ROW_TILES * COL_TILES]) {
    const uint EDGE_VECS = EDGE / 4u;
    uint mine = gl_SubgroupID * 2u * EDGE * OUT_PITCH, vecs = out_vecs();  // as in end_rows: others may be there yet
    [[unroll]] for (uint n = 0u; n < ROW_TILES * COL_TILES; ++n) {
        subgroupBarrier();
        coopMatStore(acc[n], stage, mine, OUT_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        subgroupBarrier();
        for (uint i = gl_SubgroupInvocationID; i < EDGE * EDGE_VECS; i += gl_SubgroupSize) {
            uint r = own_rows() + n / COL_TILES * EDGE + i / EDGE_VECS, row = tile.first + r;
            uint e = n % COL_TILES * EDGE_VECS + i % EDGE_VECS;
            vec4 sum = uintBitsToFloat(stage[mine + i / EDGE_VECS * OUT_PITCH + i % EDGE_VECS]) * row_factor[r];
            if (row < tile.rows && e < vecs) outputs[out_row(tile, row) + e] = half_words(sum);
        }
    }
}

void main() {
    uint first = min(push.chunk * tiles_per_chunk(), num_row_tiles());
    uint tiles = min(tiles_per_chunk(), num_row_tiles() - first);
    uint head_quads = (head_vecs() + 1u) / 2u, value_quads = (value_vecs() + 1u) / 2u;
    uint key_step = k_stride_row() / 2u, value_step = v_stride_row() / 2u, stamp = 0u, turn = 0u;
    ScoreRule rule = score_rule();
    bool unchanged = rule.mask_kind == 0u && rule.softcap == 0.0 && (flags() & FLAG_ALIBI) == 0u && rule.scale >= 0.0;
    if (gl_LocalInvocationIndex < 2u * DIRTY_WORDS) dirty_keys[gl_LocalInvocationIndex] = 0u;

    for (uint item = gl_WorkGroupID.x; item < tiles; item += gl_NumWorkGroups.x) {
        RowTile tile = heaviest_first(first + item);
        uint begin = tile_key_begin(tile), end = tile_key_end(tile);
        uint all_begin = key_begin(tile.b, row_token(min(tile.first + BLOCK_ROWS, tile.rows) - 1u));
        uint all_end = key_end(tile.b, row_token(tile.first));
        uint key_at = (push.key_base + key_offset() + tile.b * k_stride_batch() + tile.hk * k_stride_head()) / 2u;
        uint value_at = (push.value_base + value_offset() + tile.b * v_stride_batch() + tile.hk * v_stride_head()) / 2u;
        for (uint i = gl_LocalInvocationIndex; i < BLOCK_ROWS; i += THREADS)
            score_rows[i] = score_row(tile, tile.first + i);
        QUERIES q[ROW_TILES * COL_TILES];
        load_queries(tile, head_quads, q);
        Online online[STATES];
        [[unroll]] for (uint i = 0u; i < STATES; ++i) online[i] = no_keys();
        SUMS acc[ROW_TILES * COL_TILES];
        [[unroll]] for (uint n = 0u; n < ROW_TILES * COL_TILES; ++n) acc[n] = SUMS(0.0);

        // While a tile is weighed, the products with the next tile's keys are under way, and its values and the keys of
        // the tile after it are being loaded: units, arithmetic and memory work at once.
        SUMS s[ROW_TILES * KEY_TILES];
        uvec4 keys_ahead[FETCHES], values_ahead[FETCHES];
        uint col0 = next_open(rule, begin, end, stamp), next = end;
        bool plain = unchanged && is_seen_whole(col0, all_begin, all_end);
        if (col0 < end) {
            next = next_open(rule, col0 + BLOCK_KEYS, end, stamp);
            FETCH(keys_ahead, key, key_at, key_step, col0, end, head_quads)
            FETCH(values_ahead, value, value_at, value_step, col0, end, value_quads)
            stash(keys_ahead, 0u);
            stash_values(values_ahead, plain, turn);
            FETCH(keys_ahead, key, key_at, key_step, next, end, head_quads)
            barrier();
            multiply_keys(q, s);
            barrier();
            stash(keys_ahead, 0u);
            barrier();
        }
        while (col0 < end) {
            uint after = next < end ? next_open(rule, next + BLOCK_KEYS, end, stamp) : end;
            bool next_plain = unchanged && is_seen_whole(next, all_begin, all_end);
            SUMS s_next[ROW_TILES * KEY_TILES];
            QUERIES p[ROW_TILES * KEY_TILES * PARTS];
            FETCH(keys_ahead, key, key_at, key_step, after, end, head_quads)
            FETCH(values_ahead, value, value_at, value_step, next, end, value_quads)
            multiply_keys(q, s_next);  // without a next tile, of something that is not used
            weigh(plain, rule, col0, s, acc, online, p);
            add_values(p, acc);
            if (!plain || PARTS > 1u) add_all_not_finite(col0, value_at, value_step, value_quads, turn, acc);
            barrier();
            stash(keys_ahead, 0u);
            stash_values(values_ahead, next_plain, turn + 1u);
            if (gl_LocalInvocationIndex < DIRTY_WORDS)
                dirty_keys[turn % 2u * DIRTY_WORDS + gl_LocalInvocationIndex] = 0u;
            barrier();
            [[unroll]] for (uint n = 0u; n < ROW_TILES * KEY_TILES; ++n) s[n] = s_next[n];
            col0 = next;
            next = after;
            plain = next_plain;
            ++turn;
        }
        end_rows(tile, online);
        write_rows(tile, acc);
        barrier();
    }
}
