"""Makes labelled traces of a frozen backbone's decoding.

python trace_gen/generate.py trace=replay method=lbs_sequential trace.limit=512
python trace_gen/generate.py trace=masked trace.limit=512
"""

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from trace_gen.job import make_traces, summarise


@hydra.main(config_path="../conf", config_name="trace_gen", version_base="1.3")
def main(cfg: DictConfig) -> None:
    store = make_traces(cfg, instantiate(cfg.backbone), instantiate(cfg.task))
    print(f"{store.folder}: {summarise(store)}")


if __name__ == "__main__":
    main()
