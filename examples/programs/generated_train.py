"""Drawn programs of the training families."""

from _families import programs

SPLIT = "train"

PROGRAMS = programs(
  "plain",
  "pooled",
  "residual",
  "bottleneck",
  "branches",
  "grouped",
  "squeezed",
  "encoder_decoder",
  "dilated",
  "volume",
  "waveform",
  "shuffled",
  "perceptron",
  "encoder",
  "patches",
  "gated",
  "recurrent_cell",
  "linear_attention",
  "factors",
  "autoencoder",
  "windows",
)
