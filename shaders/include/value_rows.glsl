// Rows of values in any format: value_place, value_step and read_value, as key_rows.glsl.
// Includer must include key_format.glsl and params.glsl, and define the buffer `KEY value[]` and push.value_base.
#ifndef VKATTN_VALUE_ROWS
#define VKATTN_VALUE_ROWS
#define DATA value
#define BASE (push.value_base + value_offset())
#define STRIDE_BATCH v_stride_batch()
#define STRIDE_HEAD v_stride_head()
#define STRIDE_ROW v_stride_row()
#define VECS value_vecs()
#define FORMAT value_format()
#define ROWS_OF value_rows
#define PLACE value_place
#define STEP value_step
#define READ read_value
#include "rows.glsl"
#endif
