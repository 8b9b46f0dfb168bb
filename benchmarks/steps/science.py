"""Reinforcement learning and physics: loops of small steps, stencils, transforms."""

from __future__ import annotations

from _arrays import f32, i32, key, parameters, state, training
from flax import linen as nn
import jax
import jax.numpy as jnp
import optax


class Policy(nn.Module):
  actions: int = 6

  @nn.compact
  def __call__(self, x):
    for _ in range(2):
      x = nn.tanh(nn.Dense(128)(x))
    return nn.Dense(self.actions)(x), nn.Dense(1)(x)[..., 0]


def advantages(rewards, values, last, done):
  """Generalised advantage estimation, from the end of each run."""

  def one(carry, step):
    advantage, next_value = carry
    reward, value, done = step
    delta = reward + 0.99 * next_value * (1 - done) - value
    advantage = delta + 0.95 * 0.99 * (1 - done) * advantage
    return (advantage, value), advantage

  start = (jnp.zeros_like(last), last)
  return jax.lax.scan(one, start, (rewards, values, done), reverse=True)[1]


def ppo():
  """One update on runs: advantages, two epochs of shuffled minibatches."""
  policy, optimizer = Policy(), optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4))
  steps, runs = 128, 32
  params = parameters(policy, f32(8, 24))

  def loss(params, seen, actions, old, advantages, returns):
    logits, values = policy.apply(params, seen)
    log = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], 1)[:, 0]
    ratio = jnp.exp(log - old)
    clipped = jnp.clip(ratio, 0.8, 1.2) * advantages
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
    gain = jnp.minimum(ratio * advantages, clipped).mean()
    return 0.5 * jnp.square(values - returns).mean() - gain - 0.01 * entropy

  def update(params, opt_state, seen, actions, old, rewards, done, last, key):
    values = policy.apply(params, seen)[1]
    gains = advantages(rewards, values, last, done)
    flat = jax.tree.map(
      lambda x: x.reshape(steps * runs, *x.shape[2:]), (seen, actions, old, gains, gains + values)
    )

    def epoch(carry, key):
      order = jax.random.permutation(key, steps * runs)
      parts = jax.tree.map(lambda x: x[order].reshape(4, -1, *x.shape[1:]), flat)

      def minibatch(carry, part):
        params, opt_state = carry
        grads = jax.grad(loss)(params, *part)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

      return jax.lax.scan(minibatch, carry, parts)[0], None

    return jax.lax.scan(epoch, (params, opt_state), jax.random.split(key, 2))[0]

  shape = (steps, runs)
  arrays = (f32(*shape, 24), i32(*shape), f32(*shape), f32(*shape), f32(*shape), f32(runs), key())
  return jax.jit(update, donate_argnums=(0, 1)), (params, state(optimizer, params), *arrays)


def q_learning():
  """Deep Q learning on a batch that is drawn from a replay buffer."""
  network, optimizer = Policy(), optax.adam(1e-4)
  params = parameters(network, f32(8, 24))

  def step(params, target, opt_state, buffer, key):
    chosen = jax.random.randint(key, (256,), 0, len(buffer["reward"]))
    seen, action, reward, after = (
      buffer[name][chosen] for name in ("seen", "action", "reward", "after")
    )

    def loss(params):
      q = jnp.take_along_axis(network.apply(params, seen)[0], action[:, None], 1)[:, 0]
      best = reward + 0.99 * network.apply(target, after)[0].max(-1)
      return optax.huber_loss(q, jax.lax.stop_gradient(best)).mean()

    grads = jax.grad(loss)(params)
    updates, opt_state = optimizer.update(grads, opt_state)
    params = optax.apply_updates(params, updates)
    return params, optax.incremental_update(params, target, 0.005), opt_state

  rows = 20_000
  buffer = {"seen": f32(rows, 24), "action": i32(rows), "reward": f32(rows), "after": f32(rows, 24)}
  return step, (params, params, state(optimizer, params), buffer, key())


def rollout(params, angles, key):
  """Pendulums that a policy moves for 200 steps."""

  def one(carry, key):
    angle, speed = carry
    seen = jnp.stack((jnp.cos(angle), jnp.sin(angle), speed), -1)
    logits, _ = Policy(3).apply(params, seen)
    force = jax.random.categorical(key, logits) - 1.0
    speed = jnp.clip(speed + 0.05 * (15 * jnp.sin(angle) + 3 * force), -8, 8)
    angle = angle + 0.05 * speed
    reset = jnp.abs(speed) >= 8
    return (jnp.where(reset, 0.0, angle), jnp.where(reset, 0.0, speed)), angle**2

  start = (angles, jnp.zeros_like(angles))
  return jax.lax.scan(one, start, jax.random.split(key, 200))[1]


def heat(field):
  """A hundred steps of the heat equation."""
  neighbours = lambda u: sum(jnp.roll(u, shift, axis) for shift in (1, -1) for axis in (0, 1))
  step = lambda _, u: u + 0.1 * (neighbours(u) - 4 * u)
  return jax.lax.fori_loop(0, 100, step, field)


def lattice_boltzmann(flows):
  """Ten steps of a fluid on a lattice with nine directions."""
  moves = [(x, y) for x in (0, 1, -1) for y in (0, 1, -1)]
  ways = jnp.array(moves, jnp.float32)
  weights = jnp.array([4, 1, 1, 1, 0.25, 0.25, 1, 0.25, 0.25]) / 9

  def step(_, flows):
    flows = jnp.stack([jnp.roll(flow, move, (0, 1)) for flow, move in zip(flows, moves)])
    density = flows.sum(0)
    speed = jnp.einsum("dxy,dk->kxy", flows, ways) / density
    along = jnp.einsum("dk,kxy->dxy", ways, speed)
    balanced = (
      density * weights[:, None, None] * (1 + 3 * along + 4.5 * along**2 - 1.5 * (speed**2).sum(0))
    )
    return flows + 0.6 * (balanced - flows)

  return jax.lax.fori_loop(0, 10, step, flows)


def bodies(places, speeds, masses):
  """A step of bodies that attract each other."""
  apart = places[None] - places[:, None]
  cubes = (jnp.square(apart).sum(-1) + 1e-3) ** -1.5
  speeds = speeds + 1e-3 * jnp.einsum("ijk,ij,j->ik", apart, cubes, masses)
  return places + 1e-3 * speeds, speeds


def molecules(places, neighbours):
  """Forces of the neighbours of each atom, and a step."""

  def energy(places):
    apart = places[neighbours] - places[:, None]
    apart = apart - jnp.round(apart / 10.0) * 10.0
    inverse = 1.0 / (jnp.square(apart).sum(-1) + 1e-2) ** 3
    return (inverse**2 - inverse).sum()

  return places - 1e-4 * jax.grad(energy)(places)


def poisson(density):
  """A potential by Fourier transforms."""
  waves = jnp.fft.fftfreq(density.shape[0])
  squares = waves[:, None] ** 2 + waves[None, : density.shape[1] // 2 + 1] ** 2
  return jnp.fft.irfft2(jnp.fft.rfft2(density) / jnp.where(squares == 0, 1.0, squares))


class Operator(nn.Module):
  """A Fourier neural operator."""

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(32)(x)
    make = nn.initializers.normal(0.01)
    for layer in range(2):
      real, imaginary = (
        self.param(f"{name}_{layer}", make, (32, 32, 12, 12)) for name in ("real", "imaginary")
      )
      waves = jnp.fft.rfft2(x, axes=(1, 2))
      kept = jnp.einsum("bxyi,ioxy->bxyo", waves[:, :12, :12], real + 1j * imaginary)
      waves = jnp.zeros_like(waves).at[:, :12, :12].set(kept)
      x = nn.gelu(jnp.fft.irfft2(waves, axes=(1, 2)) + nn.Dense(32)(x))
    return nn.Dense(1)(x)


def operator():
  model, optimizer = Operator(), optax.adam(1e-3)
  params = parameters(model, f32(4, 64, 64, 3))
  loss = lambda params, x, y: jnp.square(model.apply(params, x) - y).mean()
  arrays = (f32(4, 64, 64, 3), f32(4, 64, 64, 1))
  return training(loss, optimizer), (params, state(optimizer, params), *arrays)


def conjugate_gradients(matrix, right):
  return jax.scipy.sparse.linalg.cg(lambda x: matrix @ x, right, maxiter=50)[0]


def physics_informed():
  """The residual of a differential equation by second derivatives of a network."""
  model, optimizer = Policy(1), optax.adam(1e-3)
  params = parameters(model, f32(8, 2))

  def loss(params, points):
    value = lambda point: model.apply(params, point)[1]
    curve = jax.vmap(jax.hessian(value))(points)
    slope = jax.vmap(jax.grad(value))(points)
    return jnp.square(slope[:, 0] - 0.01 * curve[:, 1, 1]).mean()

  return training(loss, optimizer), (params, state(optimizer, params), f32(1_024, 2))


def monte_carlo(key):
  """Prices of an option by 65,536 paths of 64 steps."""

  def one(price, key):
    return price * jnp.exp(0.02 * jax.random.normal(key, price.shape) - 0.0002), None

  prices = jax.lax.scan(one, jnp.full(65_536, 100.0), jax.random.split(key, 64))[0]
  return jnp.maximum(prices - 100, 0).mean()


PROGRAMS = {
  "ppo": ppo(),
  "q_learning": q_learning(),
  "rollout": (rollout, (parameters(Policy(3), f32(8, 3)), f32(256), key())),
  "heat": (heat, (f32(512, 512),)),
  "lattice_boltzmann": (lattice_boltzmann, (f32(9, 128, 256),)),
  "bodies": (bodies, (f32(1_024, 3), f32(1_024, 3), f32(1_024))),
  "molecules": (molecules, (f32(2_048, 3), i32(2_048, 32))),
  "poisson": (poisson, (f32(512, 512),)),
  "operator": operator(),
  "conjugate_gradients": (conjugate_gradients, (f32(1_024, 1_024), f32(1_024))),
  "physics_informed": physics_informed(),
  "monte_carlo": (monte_carlo, (key(),)),
}
