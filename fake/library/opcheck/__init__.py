from ..errors import OpCheckError

opcheck = generate_opcheck_tests = None
