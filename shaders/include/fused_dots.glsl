// Queries x keys of attn_fused: a few vecs of head_dim of all rows and keys staged at a time.
// Includer must define the sizes BLOCK_ROWS, BLOCK_COLS, DEPTH, PITCH, K_STAGE, LOAD_ROWS, Q_LOADS, K_LOADS, SCORE_X,
// SCORE_ROWS and P_PITCH, UNROLLED and ROLLED, the shared stage; and include fused.glsl and fused_places.glsl.
#ifndef VKATTN_FUSED_DOTS
#define VKATTN_FUSED_DOTS

// What is read ahead is kept as it is stored, if it is stored as floats: fewer registers, and nothing waits for it.
#if defined(KEY_QUANTISED)
#define KEYS vec4
#define load_key read_key
#define key_floats(x) (x)
#else
#define KEYS KEY
#define load_key(place, d) key[(place) + (d)]
#define key_floats key_vec
#endif
#if defined(QUERY_ANY)
#define QUERIES vec4
#define load_query read_query
#define query_floats(x) (x)
#else
#define QUERIES QUERY
#define load_query(at) query[at]
#define query_floats query_vec
#endif

// Where this invocation's rows of Q start, and K.
struct Source {
    uint query_at[Q_LOADS];
    uint key_at, key_row, vecs;
};

// Rows that do not exist are read as the last one is; their scores are not used.
Source source_of(RowTile tile) {
    Source from;
    uint slot = gl_LocalInvocationIndex / DEPTH;
    [[unroll]] for (uint i = 0u; i < Q_LOADS; ++i)
        from.query_at[i] = query_row(tile, min(tile.first + slot + LOAD_ROWS * i, tile.rows - 1u));
    from.key_at = key_place(tile.b, tile.hk);
    from.key_row = key_step();
    from.vecs = head_vecs();
    return from;
}

// <a, b> + sum in four fused multiply-adds.
float dot_add(vec4 a, vec4 b, float sum) { return fma(a.x, b.x, fma(a.y, b.y, fma(a.z, b.z, fma(a.w, b.w, sum)))); }

// Reads this invocation's part of the vecs [d0, d0 + DEPTH) of the tile's rows and of the keys [col0, end); beyond the
// end, the last key again.
void fetch(Source from, uint col0, uint end, uint d0, out QUERIES q[Q_LOADS], out KEYS k[K_LOADS]) {
    uint slot = gl_LocalInvocationIndex / DEPTH, d = d0 + gl_LocalInvocationIndex % DEPTH;
    [[unroll]] for (uint i = 0u; i < Q_LOADS; ++i) {
        q[i] = QUERIES(0);
        if (d < from.vecs) q[i] = load_query(from.query_at[i] + d);
    }
    [[unroll]] for (uint i = 0u; i < K_LOADS; ++i) {
        uint j = min(col0 + slot + LOAD_ROWS * i, end - 1u);
        k[i] = KEYS(0);
        if (d < from.vecs) k[i] = load_key(from.key_at + j * from.key_row, d);
    }
}

// Stages them as floats.
void put(QUERIES q[Q_LOADS], KEYS k[K_LOADS]) {
    uint slot = gl_LocalInvocationIndex / DEPTH, depth = gl_LocalInvocationIndex % DEPTH;
    [[unroll]] for (uint i = 0u; i < Q_LOADS; ++i) stage[(slot + LOAD_ROWS * i) * PITCH + depth] = query_floats(q[i]);
    [[unroll]] for (uint i = 0u; i < K_LOADS; ++i) {
        uint c = slot + LOAD_ROWS * i;  // key c lies at slot (c % 4) * SCORE_X + c / 4: x reads x + SCORE_X n
        stage[K_STAGE + (c % 4u * SCORE_X + c / 4u) * PITCH + depth] = key_floats(k[i]);
    }
}

// Adds what the staged vecs give to the dot products of the invocation's rows and keys. Each vec that is read from
// shared memory is used for 16 or 32 multiply-adds.
void add_dots(inout vec4 acc[SCORE_ROWS], uint x, uint y) {
    UNROLLED for (uint d = 0u; d < DEPTH; ++d) {
        uint at = K_STAGE + x * PITCH + d;
        vec4 k0 = stage[at], k1 = stage[at + SCORE_X * PITCH];
        vec4 k2 = stage[at + 2u * SCORE_X * PITCH], k3 = stage[at + 3u * SCORE_X * PITCH];
        [[unroll]] for (uint i = 0u; i < SCORE_ROWS; ++i) {
            vec4 q = stage[(SCORE_LEAP * y + SCORE_STEP * i) * PITCH + d];
            acc[i] = vec4(dot_add(q, k0, acc[i].x), dot_add(q, k1, acc[i].y), dot_add(q, k2, acc[i].z),
                          dot_add(q, k3, acc[i].w));
        }
    }
}

// Stages the dot products of all rows with the keys [col0, end) in `stage`. Begins and ends between barriers.
void stage_dots(RowTile tile, Source from, uint col0, uint end) {
    uvec2 place = place_of(gl_LocalInvocationIndex, SCORE_X);
    uint x = place.x, y = place.y;
    bool busy = tile.first + SCORE_LEAP * y < tile.rows;
    vec4 acc[SCORE_ROWS];
    QUERIES next_q[Q_LOADS];
    KEYS next_k[K_LOADS];
    [[unroll]] for (uint i = 0u; i < SCORE_ROWS; ++i) acc[i] = vec4(0.0);
    fetch(from, col0, end, 0u, next_q, next_k);
    ROLLED for (uint d0 = 0u; d0 < from.vecs; d0 += DEPTH) {
        barrier();
        put(next_q, next_k);
        barrier();
        if (d0 + DEPTH < from.vecs) fetch(from, col0, end, d0 + DEPTH, next_q, next_k);  // while these are used
        if (!MAY_IDLE || busy) add_dots(acc, x, y);
    }
    barrier();
    [[unroll]] for (uint i = 0u; i < SCORE_ROWS; ++i)
        stage[(SCORE_LEAP * y + SCORE_STEP * i) * P_PITCH + x] = acc[i];
    barrier();
}
#endif
