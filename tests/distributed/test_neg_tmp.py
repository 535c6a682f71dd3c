import pytest
from tests.distributed import post_validation_jobs as jobs
from tests.distributed.conftest import workers
def test_neg(workers, tmp_path):
    with pytest.raises(AssertionError) as e:
        workers.run(2, jobs.leads, str(tmp_path/"store"), post_validation=False, folder=str(tmp_path))
    print(str(e.value)[-600:])
