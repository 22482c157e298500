/* Structs whose values tests print: their BTF (clang -target bpf), and a library that fills them. */
enum color { RED, GREEN = 5, DEEP = 0x80000000u };
enum level { LOW = -3, MIDDLE = 0, HIGH = 7 };
enum rights { MAY_EXEC = 1, MAY_WRITE = 2, MAY_READ = 4 };

typedef char name_t[8];

struct bits {
	unsigned low : 3;
	int high : 7;
	unsigned : 4;
	unsigned long long wide : 41;
	_Bool is_set : 1;
	signed char tiny : 2;
	enum color color : 32;
};

struct point { short x, y; };
union either { struct point point; unsigned number; const void *where; };

struct values {
	const volatile int number;
	unsigned char byte;
	_Bool yes, no;
	struct {
		long inside;
		union {
			unsigned as_number;
			struct { unsigned field : 5; unsigned rest : 27; };
		};
	};
	union either either;
	struct point points[2][3];
	int numbers[5];
	unsigned char mac[6];
	name_t name, full, odd;
	char names[2][4];
	enum color color, unknown;
	enum level level;
	enum rights rights, more_rights;
	struct values *next;
	int (*compare)(const void *, const void *);
	struct bits bits;
	__int128 large;
	struct { } nothing;
	double real;
	int tail[];
};

struct far { char near[2040]; struct point points[4]; struct values *behind; };
struct nested { struct { struct { struct point point; } inner; } outer; struct point *again; };
struct tiny { char tag; short word; };

int takes(struct values *values, struct bits *bits, struct far *far, struct nested *nested, struct tiny *tiny)
{
	return 0;
}

#ifndef __bpf__
#include <string.h>

unsigned long fill(struct values *out)
{
	struct values filled = {
		.number = -7, .byte = 200, .yes = 1,
		.inside = -5000000000, .as_number = 0xffffffe3,
		.either = { .point = { -1, 2 } },
		.points = { { { 1, 2 } }, { { 0 }, { 3, -4 } } },
		.numbers = { 0, 1, -2 },
		.mac = { 0x52, 0, 0, 0, 0, 1 },
		.name = "bash", .full = "eight ch", .odd = "a\"\\\n\377",
		.names = { "ab", "four" },
		.color = DEEP, .unknown = 6, .level = LOW, .rights = MAY_READ | MAY_EXEC, .more_rights = 9,
		.next = (void *)0xffff888100a3c2a0,
		.bits = { .low = 5, .high = -60, .wide = 0x1ffffffffff, .is_set = 1, .tiny = -2, .color = DEEP },
		.large = -((__int128)1 << 100),
		.real = 1.0,
	};
	memcpy(out, &filled, sizeof(filled));
	return sizeof(filled);
}

unsigned long bits(struct bits *out, unsigned low, int high, unsigned long long wide, int is_set, int tiny)
{
	*out = (struct bits){ low, high, wide, is_set, tiny, GREEN };
	return sizeof(*out);
}
#endif
