"""Where libtpu writes schedules."""

from tpugraphs_jax.hlo import schedule_dump


def test_a_process_keeps_its_flags_of_libtpu_and_gets_a_folder_of_its_own(monkeypatch, tmp_path):
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_flag=1 --xla_jf_dump_to=/elsewhere")
  (flags,) = schedule_dump.environment(tmp_path).values()
  folders = [flag for flag in flags.split() if flag.startswith("--xla_jf_dump_to=")]
  assert folders == [f"--xla_jf_dump_to={tmp_path}"]
  assert "--xla_tpu_flag=1" in flags.split()


def test_schedules_are_taken_once_and_without_their_summaries(monkeypatch, tmp_path):
  for name, value in schedule_dump.environment(tmp_path).items():
    monkeypatch.setenv(name, value)
  (tmp_path / "17-fusion.3-01-final_bundles.txt").write_text("bundles")
  (tmp_path / "16-fusion.3-00-schedule-analysis_final_bundles.txt").write_text("summary")
  (tmp_path / "18-TLP-01-final_bundles.txt").write_text("program")
  assert schedule_dump.kernels(tmp_path) == ["fusion.3", "TLP"]
  assert schedule_dump.take() == {"fusion.3": "bundles", "TLP": "program"}
  assert schedule_dump.take() == {} and not any(tmp_path.iterdir())
