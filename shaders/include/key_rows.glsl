// Rows of keys in any format: key_place(b, hk) is the place of key 0 of a head, key_step() leads from row to row, and
// read_key(place, d) is vec d of a row. Places of floats are in vecs; quantised ones are row numbers.
// Includer must include key_format.glsl and params.glsl, and define the buffer `KEY key[]` and push.key_base.
#ifndef VKATTN_KEY_ROWS
#define VKATTN_KEY_ROWS
#define DATA key
#define BASE (push.key_base + key_offset())
#define STRIDE_BATCH k_stride_batch()
#define STRIDE_HEAD k_stride_head()
#define STRIDE_ROW k_stride_row()
#define VECS head_vecs()
#define FORMAT key_format()
#define ROWS_OF key_rows
#define PLACE key_place
#define STEP key_step
#define READ read_key
#include "rows.glsl"
#endif
