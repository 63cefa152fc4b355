// Reads states into panels of floats, and writes them.
#pragma once

#include "../transpose.hpp"
#include "plan.hpp"

namespace fa::FA_ISA::lin {

// Element (0, column) of a state.
FA_INLINE int64_t first_element(const linear::States& states, int64_t entry, int64_t head, int64_t column) {
  return entry * states.entry + head * states.head + column * states.value;
}

// Reads a panel of a state whose lines lie in memory.
static void read_lines(const linear::States& states, int64_t at, const Shape& shape, int64_t columns, float* panel) {
  for (int64_t d = 0; d < shape.keys; ++d, at += states.key, panel += kPanel) {
    const float* from = as_floats(states.data, at, columns, states.type, panel);
    if (from != panel) __builtin_memcpy(panel, from, static_cast<size_t>(columns) * sizeof(float));
    for (int64_t c = columns; c < kPanel; ++c) panel[c] = 0;
  }
}

static void write_lines(const linear::States& states, int64_t at, const Shape& shape, int64_t columns, const float* panel) {
  for (int64_t d = 0; d < shape.keys; ++d, at += states.key, panel += kPanel) {
    write_floats(states.data, at, panel, columns, states.type);
  }
}

// The same for a state that lies transposed in memory: its rows are columns of the panel. `rows` is [kPanel][row].
static void read_columns(const linear::States& states, int64_t at, const Shape& shape, int64_t columns, float* rows,
                         float* panel) {
  const float* from[kPanel];
  for (int64_t c = 0; c < kPanel; ++c) {
    float* copy = rows + c * shape.row;
    from[c] = copy;
    if (c < columns) {
      from[c] = as_floats(states.data, at + c * states.value, shape.keys, states.type, copy);
      if (from[c] != copy && shape.keys == shape.row) continue;
      if (from[c] != copy) __builtin_memcpy(copy, from[c], static_cast<size_t>(shape.keys) * sizeof(float));
      from[c] = copy;
    }
    for (int64_t d = c < columns ? shape.keys : 0; d < shape.row; ++d) copy[d] = 0;
  }
  for (int64_t d = 0; d < shape.row; d += kLanes) {
    for (int64_t c = 0; c < kPanel; c += kLanes) transpose_square(from + c, d, panel + d * kPanel + c);
  }
}

static void write_columns(const linear::States& states, int64_t at, const Shape& shape, int64_t columns, const float* panel,
                          float* rows) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    for (int64_t d = 0; d < shape.row; d += kLanes) {
      const float* from[kLanes];
      for (int64_t n = 0; n < kLanes; ++n) from[n] = panel + (d + n) * kPanel;
      transpose_square(from, c, rows + c * shape.row + d, shape.row);
    }
  }
  for (int64_t c = 0; c < columns; ++c) {
    write_floats(states.data, at + c * states.value, rows + c * shape.row, shape.keys, states.type);
  }
}

static void read_panel(const linear::States& states, int64_t entry, int64_t head, const Shape& shape, int64_t panel,
                       float* rows, float* to) {
  if (states.data == nullptr || entry < 0) {
    __builtin_memset(to, 0, static_cast<size_t>(shape.panel_floats()) * sizeof(float));
    return;
  }
  const int64_t at = first_element(states, entry, head, panel * kPanel);
  if (states.value == 1) return read_lines(states, at, shape, shape.columns(panel), to);
  read_columns(states, at, shape, shape.columns(panel), rows, to);
}

static void write_panel(const linear::States& states, int64_t entry, int64_t head, const Shape& shape, int64_t panel,
                        const float* from, float* rows) {
  const int64_t at = first_element(states, entry, head, panel * kPanel);
  if (states.value == 1) return write_lines(states, at, shape, shape.columns(panel), from);
  write_columns(states, at, shape, shape.columns(panel), from, rows);
}

}  // namespace fa::FA_ISA::lin
