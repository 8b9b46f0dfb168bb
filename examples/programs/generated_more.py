"""More drawn programs of the training families, of which fewer choices are labelled."""

from _families import programs, SEEDS

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
  seeds=range(SEEDS, 2 * SEEDS),
)
