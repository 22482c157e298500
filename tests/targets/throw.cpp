/* Throws and catches as it is told on standard input:
 *
 *   throw N     throw an integer N times, and catch each
 *   nested N    throw once, through N functions that catch and rethrow
 *   library     let the library itself throw, and throw something else while that is handled
 *   quit
 *
 * Before each answer, ".", it prints what it did, as libstdcxx's probes tell it: the probe's name, the address of the
 * object that was thrown and that of its type_info; 0 for what a program cannot know.
 */
#include <cstdint>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>
#include <typeinfo>

struct Error {
	int number;
};

static void tell(const char *step, const void *object, const std::type_info &type)
{
	std::printf("%s %ju %ju\n", step, (uintmax_t)(uintptr_t)object, (uintmax_t)(uintptr_t)&type);
}

static void nested(unsigned depth)
{
	if (!depth) {
		tell("throw", nullptr, typeid(Error));
		throw Error{7};
	}
	try {
		nested(depth - 1);
	} catch (Error &error) {
		tell("catch", &error, typeid(Error));
		tell("rethrow", &error, typeid(Error));
		throw;
	}
}

static void library()
{
	try {
		try {
			tell("throw", nullptr, typeid(std::out_of_range));
			std::string("short").at(99);
		} catch (std::exception &error) {
			tell("catch", &error, typeid(error));
			tell("throw", nullptr, typeid(std::bad_alloc));
			throw std::bad_alloc();
		}
	} catch (std::exception &error) {
		tell("catch", &error, typeid(error));
	}
}

int main()
{
	char line[64];
	unsigned count;

	std::puts("ready");
	std::fflush(stdout);
	while (std::fgets(line, sizeof line, stdin)) {
		if (std::sscanf(line, "throw %u", &count) == 1) {
			for (unsigned i = 0; i < count; i++) {
				try {
					tell("throw", nullptr, typeid(int));
					throw (int)i;
				} catch (int &number) {
					tell("catch", &number, typeid(int));
				}
			}
		} else if (std::sscanf(line, "nested %u", &count) == 1) {
			try {
				nested(count);
			} catch (Error &error) {
				tell("catch", &error, typeid(Error));
			}
		} else if (std::string(line) == "library\n") {
			library();
		} else if (std::string(line) == "quit\n") {
			break;
		}
		std::puts(".");
		std::fflush(stdout);
	}
	return 0;
}
