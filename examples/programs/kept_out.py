"""Three programs that were used for no choice about the models of output orders."""

import diffusion
import graph_network
import state_space

SPLIT = "test"

PROGRAMS = {
  "diffusion": diffusion.PROGRAMS["block_train"],
  "state_space": state_space.PROGRAMS["chunked_train"],
  "graph_attention": graph_network.PROGRAMS["attention"],
}
