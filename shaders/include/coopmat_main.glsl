// The loop of the kernels on matrix units: queries, tiles of keys and values, outputs.
// Includer must include coopmat.glsl and one of weigh_quad.glsl, weigh_shared.glsl, weigh_reduce.glsl first.

// Takes tile.first + [0, BLOCK_ROWS) into the registers of the subgroups, by way of `stage`.
void load_queries(RowTile tile, uint quads, out QUERIES q[COL_TILES]) {
    for (uint g = 0u; g < SUBGROUPS; g += QUERY_SUBGROUPS) {
        for (uint i = gl_LocalInvocationIndex; i < QUERY_SUBGROUPS * EDGE * ROW_QUADS; i += THREADS) {
            uint place = i / ROW_QUADS, quad = i % ROW_QUADS, row = tile.first + g * EDGE + place;
            bool live = row < tile.rows && quad < quads;
            stage[place * PITCH + quad] = live ? query[query_row(tile, row) / 2u + quad] : uvec4(0u);
        }
        barrier();
        if (gl_SubgroupID / QUERY_SUBGROUPS == g / QUERY_SUBGROUPS) {
            [[unroll]] for (uint d = 0u; d < COL_TILES; ++d)
                coopMatLoad(q[d], stage, gl_SubgroupID % QUERY_SUBGROUPS * EDGE * PITCH + d * EDGE_QUADS, PITCH,
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

// The same for values of the tile that is weighed in `turn`. For weights in two parts it is noted if not all are
// finite, as infinity times a second part of 0 is NaN.
void stash_values(uvec4 held[FETCHES], uint turn) {
    stash(held, STAGE);
    if (PARTS == 1u) return;
    uint found = 0u;
    [[unroll]] for (uint i = 0u; i < FETCHES; ++i) found |= not_finite(held[i]);
    if (found != 0u) soiled_turn = turn;
}

// Replaces what is not finite of the staged values by 0, each invocation what it staged, and notes the keys.
void clean_values(uint turn) {
    [[unroll]] for (uint i = 0u; i < FETCHES; ++i) {
        uint n = gl_LocalInvocationIndex + THREADS * i, j = n / ROW_QUADS, at = STAGE + j * PITCH + n % ROW_QUADS;
        if (n >= TILE_QUADS || not_finite(stage[at]) == 0u) continue;
        stage[at] = only_finite(stage[at]);
        atomicOr(dirty_keys[turn % 2u * DIRTY_WORDS + j / 32u], 1u << (j % 32u));
    }
    barrier();
}

// The products of the subgroup's queries with GROUP matrices of the staged keys.
void multiply_keys(uint first, QUERIES q[COL_TILES], inout SUMS s[KEY_TILES]) {
    [[unroll]] for (uint n = first; n < first + GROUP; ++n) s[n] = SUMS(0.0);
    [[unroll]] for (uint d = 0u; d < COL_TILES; ++d)
        [[unroll]] for (uint n = first; n < first + GROUP; ++n) {
            KEYS k;
            coopMatLoad(k, stage, n * EDGE * PITCH + d * EDGE_QUADS, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
            s[n] = coopMatMulAdd(q[d], k, s[n]);
        }
}

// Adds the staged values of the same keys to the sums, by their weights.
void add_values(uint first, QUERIES p[GROUP * PARTS], inout SUMS acc[COL_TILES]) {
    [[unroll]] for (uint n = 0u; n < GROUP; ++n)
        [[unroll]] for (uint d = 0u; d < COL_TILES; ++d) {
            KEYS v;
            coopMatLoad(v, stage, STAGE + (first + n) * EDGE * PITCH + d * EDGE_QUADS, PITCH,
                        gl_CooperativeMatrixLayoutRowMajor);
            [[unroll]] for (uint low = 0u; low < PARTS; ++low)
                acc[d] = coopMatMulAdd(p[n * PARTS + low], v, acc[d]);
        }
}

// Adds what was left out of the values of the tile at col0 to the rows that attend it (rare).
void add_all_not_finite(uint col0, uint at, uint step, uint quads, uint turn, inout SUMS acc[COL_TILES]) {
    for (uint w = 0u; w < DIRTY_WORDS; ++w)
        for (uint dirty = dirty_keys[turn % 2u * DIRTY_WORDS + w]; dirty != 0u; dirty &= dirty - 1u) {
            uint j = col0 + 32u * w + uint(findLSB(dirty));
            add_not_finite(j, at + j * step, quads, acc);
        }
}

// Whether all rows of the row tile see all keys of the tile at col0 by position, and it is staged with values that need
// no care.
bool is_whole(uint col0, uint all_begin, uint all_end, uint turn) {
    return col0 >= all_begin && col0 + BLOCK_KEYS <= all_end && (PARTS == 1u || soiled_turn != turn);
}

// One turn: weighs the tile at col0, whose products with the queries are in `s` and whose values are staged, while
// units, arithmetic and memory all work. The products with the keys of the tile at `next`, which are staged, take the
// place of what was weighed (without a next tile they are not used); values of `next` and keys of `after` are loaded,
// and staged in the end. It is no function, as passing all its matrices to one and back took a tenth of the time.
#define TURN(masking, after)                                                           \
    begin_tile(masking, rule, scale_2, col0, s, acc, online);                          \
    FETCH(keys_ahead, key, key_at, key_step, after, end, head_quads)                   \
    FETCH(values_ahead, value, value_at, value_step, next, end, value_quads)           \
    [[unroll]] for (uint n = 0u; n < KEY_TILES; n += GROUP) {                          \
        QUERIES p[GROUP * PARTS];                                                      \
        weigh(n, scale_2, s, online, p);                                               \
        multiply_keys(n, q, s);                                                        \
        add_values(n, p, acc);                                                         \
    }                                                                                  \
    barrier();                                                                         \
    stash(keys_ahead, 0u);                                                             \
    stash_values(values_ahead, turn + 1u);                                             \
    if (gl_LocalInvocationIndex < DIRTY_WORDS)                                         \
        dirty_keys[(turn + 1u) % 2u * DIRTY_WORDS + gl_LocalInvocationIndex] = 0u;     \
    barrier();

// Writes the rows of the subgroup, two matrices at a time by way of `stage`.
void write_rows(RowTile tile, SUMS acc[COL_TILES]) {
    const uint EDGE_VECS = EDGE / 4u, PLACES = EDGE * EDGE_VECS / LANES, NEXT = EDGE * OUT_PITCH;
    uint mine = gl_SubgroupID * 2u * NEXT;  // as in end_rows: others may be there yet
    uint from[PLACES], to[PLACES], end[PLACES];
    float factor[PLACES];
    subgroupBarrier();
    [[unroll]] for (uint i = 0u; i < PLACES; ++i) {  // the invocation's quads of any matrix
        uint place = LANES * i + gl_SubgroupInvocationID, r = own_rows() + place / EDGE_VECS, row = tile.first + r;
        from[i] = mine + place / EDGE_VECS * OUT_PITCH + place % EDGE_VECS;
        to[i] = out_row(tile, row);
        end[i] = row < tile.rows ? out_vecs() : 0u;
        factor[i] = row_factor[r];
    }
    [[unroll]] for (uint n = 0u; n < COL_TILES; n += 2u) {
        [[unroll]] for (uint m = 0u; m < 2u; ++m)
            coopMatStore(acc[n + m], stage, mine + m * NEXT, OUT_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        subgroupBarrier();
        [[unroll]] for (uint i = 0u; i < PLACES; ++i)
            [[unroll]] for (uint m = 0u; m < 2u; ++m) {
                uint e = (n + m) * EDGE_VECS + gl_SubgroupInvocationID % EDGE_VECS;
                if (e < end[i])
                    outputs[to[i] + e] = half_words(uintBitsToFloat(stage[from[i] + m * NEXT]) * factor[i]);
            }
        subgroupBarrier();
    }
}

void main() {
    uint first = min(push.chunk * tiles_per_chunk(), num_row_tiles());
    uint tiles = min(tiles_per_chunk(), num_row_tiles() - first);
    uint head_quads = (head_vecs() + 1u) / 2u, value_quads = (value_vecs() + 1u) / 2u;
    uint key_step = k_stride_row() / 2u, value_step = v_stride_row() / 2u, stamp = 0u, turn = 0u;
    ScoreRule rule = score_rule();
    bool is_only_scaled = rule.mask_kind == 0u && rule.softcap == 0.0 && (flags() & FLAG_ALIBI) == 0u
                          && rule.scale > 0.0;
    float scale_2 = is_only_scaled ? rule.scale * LOG2_E : 1.0;
    uint masking = is_only_scaled ? BY_PLACE : BY_RULE;
    if (gl_LocalInvocationIndex < 2u * DIRTY_WORDS) dirty_keys[gl_LocalInvocationIndex] = 0u;
    if (gl_LocalInvocationIndex == 0u) soiled_turn = ~0u;

    for (uint item = gl_WorkGroupID.x; item < tiles; item += gl_NumWorkGroups.x) {
        RowTile tile = heaviest_first(first + item);
        uint begin = tile_key_begin(tile), end = tile_key_end(tile);
        uint all_begin = key_begin(tile.b, row_token(min(tile.first + BLOCK_ROWS, tile.rows) - 1u));
        uint all_end = key_end(tile.b, row_token(tile.first));
        uint key_at = (push.key_base + key_offset() + tile.b * k_stride_batch() + tile.hk * k_stride_head()) / 2u;
        uint value_at = (push.value_base + value_offset() + tile.b * v_stride_batch() + tile.hk * v_stride_head()) / 2u;
        for (uint i = gl_LocalInvocationIndex; i < BLOCK_ROWS; i += THREADS)
            score_rows[i] = score_row(tile, tile.first + i);
        if (rule.mask_kind != 0u) barrier();
        uint col0 = next_open(rule, begin, end, stamp), next = end;
        uvec4 keys_ahead[FETCHES], values_ahead[FETCHES];
        FETCH(keys_ahead, key, key_at, key_step, col0, end, head_quads)
        FETCH(values_ahead, value, value_at, value_step, col0, end, value_quads)
        QUERIES q[COL_TILES];
        load_queries(tile, head_quads, q);
        Online online[STATES];
        [[unroll]] for (uint i = 0u; i < STATES; ++i) online[i] = no_keys();
        SUMS acc[COL_TILES], s[KEY_TILES];
        [[unroll]] for (uint d = 0u; d < COL_TILES; ++d) acc[d] = SUMS(0.0);

        if (col0 < end) {
            next = next_open(rule, col0 + BLOCK_KEYS, end, stamp);
            stash(keys_ahead, 0u);
            stash_values(values_ahead, turn);
            FETCH(keys_ahead, key, key_at, key_step, next, end, head_quads)
            barrier();
            [[unroll]] for (uint n = 0u; n < KEY_TILES; n += GROUP) multiply_keys(n, q, s);
            barrier();
            stash(keys_ahead, 0u);
            barrier();
        }
        while (col0 < end) {
            // What all rows see whole has a loop of its own, so that nothing else takes registers there. That rows are
            // only scaled is asked here: folded into all_end it took a compiler's loop a tenth longer.
            for (; is_only_scaled && is_whole(col0, all_begin, all_end, turn); ++turn) {
                uint after = next + BLOCK_KEYS;
                TURN(NOTHING, after)
                col0 = next;
                next = after;
            }
            if (col0 >= end) break;
            uint after = next < end ? next_open(rule, next + BLOCK_KEYS, end, stamp) : end;
            clean_values(turn);
            TURN(masking, after)
            add_all_not_finite(col0, value_at, value_step, value_quads, turn, acc);
            col0 = next;
            next = after;
            ++turn;
        }
        end_rows(tile, online);
        write_rows(tile, acc);
        barrier();
    }
}
