// Write the panel width, the inputs per AMX tile, and the bias of stored 8-bit weights, and whether this CPU has AMX tiles
// and the dot product instruction.
EXPORT(get_cpu_features, int64_t* panel, int64_t* tile_inputs, int64_t* weight_bias, int64_t* has_tiles, int64_t* has_dot) {
  *panel = PANEL;
  *tile_inputs = TILE_INPUTS;
  *weight_bias = WEIGHT_BIAS;
  *has_tiles = request_amx_permission();
  *has_dot = has_dot_product();
}
