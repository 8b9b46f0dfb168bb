"""Linear algebra, transforms, random numbers, and products of few bits."""

from _arrays import bf16, f32, i8, i32, key
import jax
import jax.numpy as jnp

FLOAT8, INT4 = jnp.float8_e4m3fn, jnp.int4


def positive(matrix):
  return matrix @ matrix.T + 0.1 * jnp.eye(len(matrix))


def least_squares(x, y):
  return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(positive(x.T)), x.T @ y)


def gaussian_process(x, y, queries):
  """Mean and variance of a process with a Gaussian kernel."""
  kernel = lambda a, b: jnp.exp(-jnp.square(a[:, None] - b[None]).sum(-1))
  factor = jnp.linalg.cholesky(kernel(x, x) + 0.1 * jnp.eye(len(x)))
  between = kernel(x, queries)
  solved = jax.scipy.linalg.solve_triangular(factor, between, lower=True)
  weights = jax.scipy.linalg.cho_solve((factor, True), y)
  return between.T @ weights, 1 - jnp.square(solved).sum(0)


def kalman(measured, mean, covariance):
  """A filter of 100 measurements of many objects."""
  moves = jnp.eye(4).at[0, 2].set(0.1).at[1, 3].set(0.1)
  seen = jnp.eye(4)[:2]

  def one(carry, measured):
    mean, covariance = carry
    mean, covariance = mean @ moves.T, moves @ covariance @ moves.T + 0.01 * jnp.eye(4)
    gain = covariance @ seen.T @ jnp.linalg.inv(seen @ covariance @ seen.T + 0.1 * jnp.eye(2))
    mean = mean + (gain @ (measured - mean @ seen.T)[..., None])[..., 0]
    return (mean, covariance - gain @ seen @ covariance), mean

  return jax.lax.scan(one, (mean, covariance), measured)[1]


def newton_schulz(matrix):
  x = matrix / (jnp.linalg.norm(matrix) + 1e-7)
  for _ in range(5):
    product = x @ x.T
    x = 3.4445 * x + (-4.775 * product + 2.0315 * product @ product) @ x
  return x


def power_iteration(matrix, vector):
  def one(_, vector):
    vector = matrix @ vector
    return vector / jnp.linalg.norm(vector)

  return jax.lax.fori_loop(0, 20, one, vector)


def spectrogram(sound):
  return jnp.square(jnp.abs(jax.scipy.signal.stft(sound, nperseg=256)[2]))


def convolve_long(x, kernel):
  """A long convolution by Fourier transforms, as Hyena's."""
  size = 2 * x.shape[-1]
  return jnp.fft.irfft(jnp.fft.rfft(x, size) * jnp.fft.rfft(kernel, size), size)[..., : x.shape[-1]]


def int8_product(x, w):
  return jax.lax.dot(x, w, preferred_element_type=jnp.int32)


def dynamic_int8(x, w, scales):
  """Activations are rounded to 8 bits row by row."""
  scale = jnp.abs(x).max(-1, keepdims=True) / 127
  rounded = jnp.round(x / scale).astype(jnp.int8)
  return (int8_product(rounded, w) * scale * scales).astype(jnp.bfloat16)


def weights_int8(x, w, scales):
  return (x @ w.astype(x.dtype)) * scales


def weights_int4(x, w, scales):
  """Weights of 4 bits with a scale for each 128 rows."""
  groups = scales.shape[0]
  full = w.reshape(groups, -1, w.shape[-1]).astype(x.dtype) * scales[:, None]
  return x @ full.reshape(w.shape)


def float8_product(x, w):
  scale = jnp.abs(x).max() / 448
  rounded = (x / scale).astype(FLOAT8)
  return jax.lax.dot(rounded, w, preferred_element_type=jnp.float32) * scale


def quantise(x):
  scale = jnp.abs(x).max(-1, keepdims=True) / 127
  return jnp.round(x / scale).astype(jnp.int8), scale[..., 0]


def straight_through(x, w):
  """The gradient of a product whose weights are rounded."""
  rounded = lambda w: w + jax.lax.stop_gradient(jnp.round(w * 127) / 127 - w)
  return jax.grad(lambda w: jnp.square(x @ rounded(w)).sum())(w)


SQUARE = f32(512, 512)
PROGRAMS = {
  "matmul_bf16": (jnp.matmul, (bf16(2_048, 2_048), bf16(2_048, 2_048))),
  "matmul_f32": (jnp.matmul, (f32(1_024, 1_024), f32(1_024, 1_024))),
  "matmul_highest": (
    lambda a, b: jnp.matmul(a, b, precision="highest"),
    (f32(1_024, 1_024), f32(1_024, 1_024)),
  ),
  "matrix_vector": (jnp.matmul, (bf16(8_192, 4_096), bf16(4_096))),
  "batched": (jnp.matmul, (bf16(256, 128, 128), bf16(256, 128, 128))),
  "cholesky": (lambda a: jnp.linalg.cholesky(positive(a)), (SQUARE,)),
  "least_squares": (least_squares, (f32(4_096, 256), f32(4_096, 8))),
  "solve": (jnp.linalg.solve, (f32(256, 256), f32(256, 16))),
  "inverses": (jnp.linalg.inv, (f32(64, 16, 16),)),
  "qr": (jnp.linalg.qr, (f32(256, 128),)),
  "eigenvalues": (jnp.linalg.eigh, (f32(128, 128),)),
  "singular_values": (jnp.linalg.svd, (f32(128, 64),)),
  "gaussian_process": (gaussian_process, (f32(512, 4), f32(512), f32(256, 4))),
  "kalman": (kalman, (f32(100, 128, 2), f32(128, 4), f32(128, 4, 4))),
  "newton_schulz": (newton_schulz, (bf16(1_024, 1_024),)),
  "exponential": (jax.scipy.linalg.expm, (f32(128, 128),)),
  "power_iteration": (power_iteration, (f32(2_048, 2_048), f32(2_048))),
  "fft": (jnp.fft.fft, (jax.ShapeDtypeStruct((64, 4_096), jnp.complex64),)),
  "fft2": (jnp.fft.fft2, (jax.ShapeDtypeStruct((8, 128, 128), jnp.complex64),)),
  "spectrogram": (spectrogram, (f32(8, 16_000),)),
  "convolve_long": (convolve_long, (f32(2, 8, 512), f32(8, 512))),
  "normal": (lambda key: jax.random.normal(key, (2_048, 2_048)), (key(),)),
  "bernoulli": (
    lambda key, x: jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0),
    (key(), bf16(4_096, 1_024)),
  ),
  "layer_norm": (jax.nn.standardize, (bf16(8_192, 2_048),)),
  "softmax": (jax.nn.softmax, (bf16(4_096, 4_096),)),
  "transpose": (lambda x: x.transpose(0, 2, 1, 3) + 1, (bf16(8, 1_024, 16, 64),)),
  "int8_product": (int8_product, (i8(1_024, 2_048), i8(2_048, 2_048))),
  "dynamic_int8": (dynamic_int8, (bf16(512, 2_048), i8(2_048, 4_096), f32(4_096))),
  "weights_int8": (weights_int8, (bf16(16, 4_096), i8(4_096, 4_096), bf16(4_096))),
  "weights_int4": (
    weights_int4,
    (bf16(16, 4_096), jax.ShapeDtypeStruct((4_096, 4_096), INT4), bf16(32, 4_096)),
  ),
  "float8_product": (
    float8_product,
    (bf16(1_024, 2_048), jax.ShapeDtypeStruct((2_048, 2_048), FLOAT8)),
  ),
  "quantise": (quantise, (bf16(4_096, 4_096),)),
  "straight_through": (straight_through, (f32(1_024, 512), f32(512, 512))),
  "lookup_int8": (
    lambda table, scales, words: table[words].astype(jnp.bfloat16) * scales[words][:, None],
    (i8(32_000, 1_024), bf16(32_000), i32(2_048)),
  ),
}
