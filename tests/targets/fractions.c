/*
 * A program with the probe fractions:values. It fires COUNT times, with i / 400.0 as a double and i / 4.0 as a float.
 */
#include <sys/sdt.h>

#include <stdlib.h>

int main(int argc, char **argv)
{
	int count = argc > 1 ? atoi(argv[1]) : 1;

	for (int i = 0; i < count; i++) {
		volatile double share = i / 400.0;
		volatile float quarter = i / 4.0f;

		STAP_PROBE2(fractions, values, share, quarter);
	}
	return 0;
}
