# In a repository of your site's recipes: packages/py-rankxform/package.py. It builds a clone:
#
#   spack develop --path /path/to/the/clone py-rankxform@0.1.0 && spack install
from spack.package import *

try:
    from spack_repo.builtin.build_systems.python import PythonPackage
except ImportError:  # Spack before 1.0
    pass


class PyRankxform(PythonPackage):
    """Move a distributed MindSpore checkpoint between parallel strategies."""

    license("Apache-2.0")

    version("0.1.0")

    variant("yaml", default=True, description="Read MindFormers' configurations")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@64:", type="build")
    depends_on("py-numpy@1.25:", type=("build", "run"))
    depends_on("py-ml-dtypes@0.5:", type=("build", "run"))
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-tomli", type=("build", "run"), when="^python@:3.10")
    depends_on("py-pyyaml", type=("build", "run"), when="+yaml")
