/* Types and functions whose BTF tests read, and a program that prints where everything is.
 *
 * clang -target bpf takes no structs by value, nor more than five arguments. gcc -gbtf (12) takes these, and writes the
 * dimensions of an array in the wrong order.
 *
 *   place outer->numbers[2] 24 4           offset and size in bytes
 *   bits outer->flags.high 35 7            first bit and width
 *   call with_pair 101 201 202 301 0 0     what the registers of arguments hold at the beginning of a function
 */
#ifndef __bpf__
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#endif

enum color { RED, GREEN = 5, DEEP = 0x80000000u };
enum level { LOW = -3, HIGH = 7 };

struct pair { long first, second; };
struct large { long words[3]; };
struct __attribute__((packed)) odd { char tag; long value; };
struct mixed { double number; long word; };
struct empty { };

struct flags {
	unsigned low : 3;
	int high : 7;
	unsigned : 4;
	unsigned long long wide : 41;
	_Bool is_set : 1;
};

union either {
	struct { short x; unsigned char bytes[6]; };
	struct pair pair;
	const char *name;
};

struct opaque;
typedef struct pair pair_t;
typedef int (*compare_t)(const void *, const void *);

struct outer {
	char tag;
	int numbers[4];
	struct flags flags;
	struct {
		long inside;
		union {
			unsigned as_number;
			unsigned char as_bytes[4];
			struct { unsigned field : 5; unsigned rest : 27; };
		};
	};
	union either either;
	pair_t pairs[3][2];
	enum color color;
	enum level level;
	struct outer *next;
	struct outer **others;
	struct opaque *opaque;
	const char *const name;
	compare_t compare;
	void *anything;
	char label[8];
	int tail[];
};

#define BODY { return 0; }

int by_pointer(struct outer *outer, const volatile char *text, int (*rows)[3], compare_t compare, void *anything) BODY
void returns_nothing(void) { }

#ifndef __bpf__
int with_pair(int a, struct pair pair, int b) BODY
int with_large(int a, struct large large, int b) BODY
int with_odd(int a, struct odd odd, int b) BODY
int with_empty(int a, struct empty empty, int b) BODY
int with_wide(int a, __int128 wide, int b) BODY
int with_float(int a, double number, int b) BODY
int with_mixed(int a, struct mixed mixed, int b) BODY
int with_many(int a, int b, int c, int d, int e, struct pair pair, int f, int g, int h, int i) BODY
int variadic(const char *format, ...) BODY
struct large returns_large(int a, int b) { return (struct large){}; }
struct pair returns_pair(int a) { return (struct pair){}; }
double returns_float(int a) BODY

#define PLACE(path) \
	printf("place outer->" #path " %zu %zu\n", offsetof(struct outer, path), sizeof(((struct outer *)0)->path))
#define BITS(path) do { \
	struct outer outer; \
	unsigned char *bytes = memset(&outer, 0, sizeof(outer)); \
	int first = -1, width = 0; \
	outer.path = -1; \
	for (int bit = 0; bit < 8 * (int)sizeof(outer); bit++) \
		if (bytes[bit / 8] >> bit % 8 & 1) { first = first < 0 ? bit : first; width++; } \
	printf("bits outer->" #path " %d %d\n", first, width); \
} while (0)

#ifdef __x86_64__
unsigned long seen[6];
struct large copied;

asm(".text\n"
    "capture: mov %rdi, seen(%rip)\n"
    "mov %rsi, seen+8(%rip)\n"
    "mov %rdx, seen+16(%rip)\n"
    "mov %rcx, seen+24(%rip)\n"
    "mov %r8, seen+32(%rip)\n"
    "mov %r9, seen+40(%rip)\n"
    "ret\n");

#define CALL(function, ...) do { \
	extern __typeof__(function) seen_##function asm("capture"); \
	memset(seen, 0, sizeof(seen)); \
	seen_##function(__VA_ARGS__); \
	printf("call " #function); \
	for (int index = 0; index < 6; index++) \
		printf(" %lu", seen[index] & 0xffffffff); \
	printf("\n"); \
} while (0)

/* word w of argument a, both counted from 1, is 100 * a + w */
static void print_calls(void)
{
	CALL(with_pair, 101, ((struct pair){ 201, 202 }), 301);
	CALL(with_large, 101, ((struct large){ { 201, 202, 203 } }), 301);
	CALL(with_odd, 101, ((struct odd){ 1, 201 }), 301);
	CALL(with_empty, 101, ((struct empty){}), 301);
	CALL(with_wide, 101, (__int128)202 << 64 | 201, 301);
	CALL(with_float, 101, 201.0, 301);
	CALL(with_many, 101, 201, 301, 401, 501, ((struct pair){ 601, 602 }), 701, 801, 901, 1001);
	CALL(returns_large, 101, 201);
	CALL(returns_pair, 101);
}
#else
static void print_calls(void) { }
#endif

int main(void)
{
	PLACE(tag);
	PLACE(numbers);
	PLACE(numbers[2]);
	PLACE(inside);
	PLACE(as_number);
	PLACE(as_bytes[3]);
	PLACE(either);
	PLACE(either.x);
	PLACE(either.bytes[5]);
	PLACE(either.pair.second);
	PLACE(pairs);
	PLACE(pairs[2]);
	PLACE(pairs[2][1]);
	PLACE(pairs[1][1].second);
	PLACE(color);
	PLACE(level);
	PLACE(next);
	PLACE(others);
	PLACE(name);
	PLACE(compare);
	PLACE(label);
	BITS(flags.low);
	BITS(flags.high);
	BITS(flags.wide);
	BITS(flags.is_set);
	BITS(field);
	BITS(rest);
	print_calls();
	return 0;
}
#endif
