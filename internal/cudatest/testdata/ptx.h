// Runs kernels written in PTX on the processor, one thread after the other: the same part of the language as package ptxtest,
// but less strictly. The file that includes it provides find(), which returns where memory of the device is.

typedef struct { int reg; uint64_t constant; } ptx_operand;
typedef struct {
	int op, guard, dst[4], count, width, parameter, hint;
	ptx_operand src[3];
	uint64_t offset;
	char target[32];
} ptx_step;
typedef struct { char name[32]; int first, count; } ptx_registers;
typedef struct { char name[32]; int size, offset; } ptx_parameter;
typedef struct { char name[32]; int at; } ptx_label;
typedef struct {
	ptx_step steps[1024];
	ptx_registers classes[32];
	ptx_parameter parameters[16];
	ptx_label labels[64];
	int n_steps, n_classes, n_parameters, n_labels, n_registers, size;
} ptx_kernel;

static float ptx_single(uint64_t bits) { uint32_t b = bits; float f; memcpy(&f, &b, 4); return f; }
static double ptx_double(uint64_t bits) { double f; memcpy(&f, &bits, 8); return f; }
static uint64_t ptx_32(float f) { uint32_t b; memcpy(&b, &f, 4); return f != f ? 0x7fffffff : b; }
static uint64_t ptx_64(double f) { uint64_t b; memcpy(&b, &f, 8); return f != f ? 0x7fffffffffffffff : b; }

static uint64_t ptx_widen(uint64_t h)
{
	int exponent = h >> 10 & 0x1f;
	float f = exponent ? (float)(1024 + (h & 0x3ff)) : (float)(h & 0x3ff);
	if (exponent == 0x1f)
		return h & 0x3ff ? 0x7fffffff : (h & 0x8000) << 16 | 0x7f800000;
	for (int i = exponent ? exponent : 1; i < 25; i++)
		f /= 2;
	for (int i = 25; i < exponent; i++)
		f *= 2;
	return ptx_32(h & 0x8000 ? -f : f);
}

static uint64_t ptx_narrow(uint64_t bits)
{
	uint64_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
	int exponent = magnitude >> 23, drop = exponent < 113 ? 126 - exponent : 13; // bits of the fraction that are lost
	uint64_t fraction = (magnitude & 0x7fffff) | 0x800000, kept, lost;
	if (magnitude > 0x7f800000)
		return 0x7fff;
	if (magnitude >= 0x477ff000)
		return sign | 0x7c00;
	if (drop > 25)
		return sign;
	kept = fraction >> drop, lost = fraction & ((1ull << drop) - 1);
	kept += lost > 1ull << (drop - 1) || (lost == 1ull << (drop - 1) && (kept & 1));
	return sign | (exponent < 113 ? kept : ((uint64_t)(exponent - 112) << 10) + kept - 0x400);
}

static int64_t ptx_truncate(double f, double limit) { return f >= -limit && f < limit ? (int64_t)f : 0x5555; }
static int64_t ptx_divide(int64_t a, int64_t b) { return b == 0 ? -1 : b == -1 ? (int64_t)-(uint64_t)a : a / b; }

// 2 to the x, by the series of e.
static float ptx_exp2(float x)
{
	if (x != x || x > 128 || x < -150)
		return x != x ? x : x > 0 ? 1 / 0.f : 0;
	int whole = (int)x;
	double y = (x - whole) * 0.69314718055994531, sum = 1, term = 1;
	for (int i = 1; i < 20; i++)
		sum += term *= y / i;
	for (; whole > 0; whole--)
		sum *= 2;
	for (; whole < 0; whole++)
		sum /= 2;
	return sum;
}

// The logarithm to base 2, by the series of the inverse hyperbolic tangent.
static float ptx_log2(float x)
{
	if (!(x > 0) || x - x != 0)
		return x == 0 ? -1 / 0.f : x > 0 ? x : 0 / 0.f;
	double y = x, whole = 0, sum = 0;
	for (; y > 1.5; y /= 2)
		whole++;
	for (; y < 0.75; y *= 2)
		whole--;
	double z = (y - 1) / (y + 1), power = z;
	for (int i = 1; i < 60; i += 2, power *= z * z)
		sum += power / i;
	return whole + 2 * sum / 0.69314718055994531;
}

#ifndef WRONG
#define WRONG 0 // the error of sums, for tests of tests
#endif
#define F(x) ptx_single(x)
#define D(x) ptx_double(x)
#define S(x) ((int32_t)(x))
#define L(x) ((int64_t)(x))
#define U(x) ((uint64_t)(uint32_t)(x))
#define COMPARE(name, op) \
	X("setp." name ".f32", F(a) op F(b)) X("setp." name ".f64", D(a) op D(b))
#define BITS(t) X("mov." t, a) X("and." t, a & b) X("or." t, a | b) X("selp." t, c ? a : b)
#define OPERATIONS \
	BITS("b16") BITS("b32") BITS("b64") X("mov.u32", a) X("mov.u64", a) \
	X("mul.wide.u32", U(a) * U(b)) X("cvt.u64.u32", a) X("cvt.u32.u16", a) X("cvt.u32.u64", U(a)) X("cvt.u16.u32", (uint16_t)a) \
	X("cvta.to.global.u64", a) X("shl.b64", a << b) X("shl.b32", U(a << b)) X("shr.u32", a >> b) \
	X("cvt.f32.f16", ptx_widen(a)) X("cvt.rn.f16.f32", ptx_narrow(a)) X("cvt.rn.f32.f64", ptx_32(D(a))) \
	X("cvt.rn.f64.s32", ptx_64(S(a))) X("cvt.rn.f64.s64", ptx_64(L(a))) X("cvt.rn.f32.u32", ptx_32(U(a))) \
	X("cvt.rzi.s32.f64", U(ptx_truncate(D(a), 0x1p31))) X("cvt.rzi.s64.f64", ptx_truncate(D(a), 0x1p63)) \
	X("ex2.approx.f32", ptx_32(ptx_exp2(F(a)))) X("lg2.approx.f32", ptx_32(ptx_log2(F(a)))) \
	X("add.s32", U(a + b)) X("add.u32", U(a + b)) X("add.s64", a + b) X("add.u64", a + b) \
	X("sub.s32", U(a - b)) X("sub.u32", U(a - b)) X("sub.s64", a - b) X("sub.u64", a - b) \
	X("mul.lo.s32", U(a * b)) X("mul.lo.u32", U(a * b)) X("mul.lo.s64", a * b) X("mul.lo.u64", a * b) \
	X("min.s32", S(a) < S(b) ? a : b) X("max.s32", S(a) > S(b) ? a : b) X("min.s64", L(a) < L(b) ? a : b) X("max.s64", L(a) > L(b) ? a : b) \
	X("div.s32", U(ptx_divide(S(a), S(b)))) X("div.s64", ptx_divide(L(a), L(b))) X("div.u32", U(b) ? U(a) / U(b) : U(-1)) X("div.u64", b ? a / b : -1ull) \
	X("setp.ge.u32", U(a) >= U(b)) X("setp.lt.u32", U(a) < U(b)) X("setp.eq.u32", U(a) == U(b)) \
	X("setp.ge.u64", a >= b) X("setp.lt.u64", a < b) X("setp.eq.u64", a == b) \
	COMPARE("lt", <) COMPARE("le", <=) COMPARE("gt", >) COMPARE("ge", >=) COMPARE("eq", ==) \
	X("setp.nan.f32", F(a) != F(a) || F(b) != F(b)) X("setp.nan.f64", D(a) != D(a) || D(b) != D(b)) \
	X("add.rn.f32", ptx_32(F(a) + F(b)) ^ WRONG) X("sub.rn.f32", ptx_32(F(a) - F(b))) X("mul.rn.f32", ptx_32(F(a) * F(b))) X("div.rn.f32", ptx_32(F(a) / F(b))) \
	X("add.rn.f64", ptx_64(D(a) + D(b))) X("mul.rn.f64", ptx_64(D(a) * D(b))) X("div.rn.f64", ptx_64(D(a) / D(b)))

enum { PTX_FIRST = __COUNTER__ + 1 };
static const struct { const char *name; int op; } ptx_names[] = {
#define X(name, value) {name, __COUNTER__ - PTX_FIRST},
	OPERATIONS
#undef X
};
enum { PTX_NAMES = sizeof ptx_names / sizeof *ptx_names };
enum { PTX_LOAD = PTX_NAMES, PTX_STORE, PTX_BRANCH, PTX_RETURN, PTX_SPLIT, PTX_JOIN, PTX_SPECIAL };
static const char *const ptx_specials[] = {"%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x"};

// ptx_register finds a register by its name, or makes all of a declaration.
static int ptx_register(ptx_kernel *k, const char *name)
{
	char base[32];
	for (int i = 0; i < k->n_classes; i++)
		if (k->classes[i].count == 0 && !strcmp(k->classes[i].name, name))
			return k->classes[i].first;
	snprintf(base, sizeof base, "%s", name);
	int n = strlen(base);
	while (n > 0 && base[n - 1] >= '0' && base[n - 1] <= '9')
		n--;
	int number = atoi(base + n);
	base[n] = 0;
	for (int i = 0; i < k->n_classes; i++)
		if (!strcmp(k->classes[i].name, base) && number < k->classes[i].count)
			return k->classes[i].first + number;
	return -1;
}

static int ptx_find_parameter(ptx_kernel *k, const char *name)
{
	for (int i = 0; i < k->n_parameters; i++)
		if (!strcmp(k->parameters[i].name, name))
			return i;
	return -1;
}

static int ptx_declare(ptx_kernel *k, char *text)
{
	char *rest = strchr(text, ' ');
	for (char *name = rest ? strtok(rest, ", ;") : 0; name; name = strtok(0, ", ;")) {
		ptx_registers *r = &k->classes[k->n_classes++];
		char *several = strchr(name, '<');
		r->count = several ? atoi(several + 1) : 0;
		if (several)
			*several = 0;
		snprintf(r->name, sizeof r->name, "%s", name);
		r->first = k->n_registers;
		k->n_registers += r->count ? r->count : 1;
		if (k->n_classes == 32 || k->n_registers > 4096)
			return 0;
	}
	return 1;
}

static int ptx_declare_parameter(ptx_kernel *k, char *text)
{
	ptx_parameter *p = &k->parameters[k->n_parameters++];
	char *name = strrchr(text, ' ') + 1, *array = strchr(name, '[');
	int align = 8;
	name[strcspn(name, ",")] = 0;
	if (array)
		p->size = atoi(array + 1), *array = 0;
	else
		p->size = align = atoi(text + strcspn(text, "346")) / 8;
	snprintf(p->name, sizeof p->name, "%s", name);
	p->offset = (k->size + align - 1) / align * align;
	k->size = p->offset + p->size;
	return k->n_parameters < 16 && p->size > 0 && k->size <= 512;
}

// ptx_operands splits at commas outside of braces, and returns how many there are.
static int ptx_operands(char *text, char **all)
{
	int n = 0, depth = 0;
	while (*text) {
		while (*text == ' ')
			text++;
		all[n++] = text;
		for (; *text && (*text != ',' || depth); text++)
			depth += *text == '{' ? 1 : *text == '}' ? -1 : 0;
		if (*text)
			*text++ = 0;
		if (n == 4)
			break;
	}
	return n;
}

// ptx_group reads one register, or some in braces.
static int ptx_group(ptx_kernel *k, char *text, int *out)
{
	int n = 0;
	for (char *name = strtok(text, "{}, "); name && n < 4; name = strtok(0, "{}, "))
		if ((out[n++] = ptx_register(k, name)) < 0)
			return 0;
	return n;
}

static int ptx_memory(ptx_kernel *k, ptx_step *s, const char *op, char *data, char *address)
{
	int p;
	s->width = atoi(op + strlen(op) - 2) / 8;
	s->parameter = strncmp(op + 3, "param.", 6) == 0;
	s->count = ptx_group(k, data, s->dst);
	address[strcspn(address, "]")] = 0;
	char *plus = strchr(++address, '+');
	if (plus)
		s->offset = strtoull(plus + 1, 0, 0), *plus = 0;
	s->src[0].reg = -1;
	if ((p = ptx_find_parameter(k, address)) >= 0)
		s->offset += k->parameters[p].offset;
	else if ((s->src[0].reg = ptx_register(k, address)) < 0)
		return 0;
	return s->count > 0 && s->width > 1;
}

static int ptx_instruction(ptx_kernel *k, char *line)
{
	ptx_step *s = &k->steps[k->n_steps++];
	char *args[4] = {0}, *op = line;
	line[strcspn(line, ";")] = 0;
	s->guard = -1;
	if (*op == '@') {
		char *space = strchr(op, ' ');
		*space = 0;
		s->guard = ptx_register(k, op + 1);
		op = space + 1;
	}
	char *rest = strchr(op, ' ');
	if (rest)
		*rest++ = 0;
	if (!strcmp(op, "ret"))
		return s->op = PTX_RETURN, 1;
	if (!strcmp(op, "bra"))
		return s->op = PTX_BRANCH, snprintf(s->target, sizeof s->target, "%s", rest), 1;
	int n = rest ? ptx_operands(rest, args) : 0;
	if (k->n_steps == 1024 || n < 2)
		return 0;
	if (!strncmp(op, "ld.", 3))
		return s->op = PTX_LOAD, ptx_memory(k, s, op, args[0], args[1]);
	if (!strncmp(op, "st.", 3))
		return s->op = PTX_STORE, ptx_memory(k, s, op, args[1], args[0]);
	if (!strcmp(op, "mov.b32") && (*args[0] == '{' || *args[1] == '{')) {
		int split = *args[0] == '{';
		s->op = split ? PTX_SPLIT : PTX_JOIN;
		s->dst[2] = ptx_register(k, args[split]);
		return ptx_group(k, args[!split], s->dst) == 2 && s->dst[2] >= 0;
	}
	if ((s->dst[0] = ptx_register(k, args[0])) < 0)
		return 0;
	for (int i = 0; i < 4; i++)
		if (!strcmp(op, "mov.u32") && !strcmp(args[1], ptx_specials[i]))
			return s->op = PTX_SPECIAL, s->offset = i, 1;
	for (int i = 1; i < n; i++) {
		int p = ptx_find_parameter(k, args[i]);
		s->src[i - 1].reg = *args[i] == '%' ? ptx_register(k, args[i]) : -1;
		s->src[i - 1].constant = p >= 0 ? k->parameters[p].offset : strtoull(args[i], 0, 0);
		if (*args[i] == '%' && s->src[i - 1].reg < 0)
			return 0;
	}
	for (int i = n - 1; i < 3; i++)
		s->src[i].reg = -1;
	for (int i = 0; i < PTX_NAMES; i++)
		if (!strcmp(op, ptx_names[i].name))
			return s->op = i, 1;
	return 0;
}

// ptx_parse reads the kernel of that name in a module's text. It returns 0 if it does not understand it.
static int ptx_parse(ptx_kernel *k, const char *text, const char *name)
{
	char entry[128], line[512];
	snprintf(entry, sizeof entry, ".entry %s(", name);
	text = strstr(text, entry);
	memset(k, 0, sizeof *k);
	for (text = text ? strchr(text, '\n') : 0; text; text = strchr(text, '\n')) {
		text += 1 + strspn(text + 1, " \t");
		int n = strcspn(text, "\n");
		if (n >= (int)sizeof line)
			return 0;
		memcpy(line, text, n);
		line[n] = 0;
		char *comment = strstr(line, "//");
		if (comment)
			*comment = 0;
		for (n = strlen(line); n > 0 && strchr(" \t", line[n - 1]); n--)
			line[n - 1] = 0;
		if (*line == '}')
			return k->n_steps > 0;
		if (n == 0 || *line == '{' || *line == ')')
			continue;
		int ok = 1;
		if (!strncmp(line, ".param ", 7))
			ok = ptx_declare_parameter(k, line + 7);
		else if (!strncmp(line, ".reg .", 6))
			ok = ptx_declare(k, line + 6);
		else if (line[n - 1] == ':') {
			line[n - 1] = 0;
			ptx_label *l = &k->labels[k->n_labels++];
			ok = k->n_labels < 64 && n < (int)sizeof l->name;
			if (ok)
				memcpy(l->name, line, n), l->at = k->n_steps;
		} else
			ok = ptx_instruction(k, line);
		if (!ok)
			return 0;
	}
	return 0;
}

// ptx_resolve finds the targets of branches.
static int ptx_resolve(ptx_kernel *k)
{
	for (int i = 0; i < k->n_steps; i++) {
		ptx_step *s = &k->steps[i];
		if (s->op != PTX_BRANCH)
			continue;
		s->dst[0] = -1;
		for (int j = 0; j < k->n_labels; j++)
			if (!strcmp(k->labels[j].name, s->target))
				s->dst[0] = k->labels[j].at;
		if (s->dst[0] < 0)
			return 0;
	}
	return 1;
}

static int ptx_access(ptx_step *s, uint64_t *r, char *param)
{
	uint64_t address = s->offset + (s->src[0].reg >= 0 ? r[s->src[0].reg] : 0);
	char *at = param + address;
	if (!s->parameter) {
		int place = address % (s->width * s->count) ? -1 : find_near(s->hint, address, s->width * s->count);
		if (place < 0)
			return 0;
		s->hint = place;
		at = (char *)address;
	} else if (address + s->width * s->count > 512)
		return 0;
	for (int i = 0; i < s->count; i++, at += s->width) {
		uint64_t *v = &r[s->dst[i]];
		if (s->op == PTX_LOAD)
			*v = 0, memcpy(v, at, s->width);
		else
			memcpy(at, v, s->width);
	}
	return 1;
}

// ptx_thread runs one thread. It returns 0 if the thread accesses memory that it must not access.
static int ptx_thread(ptx_kernel *k, uint64_t *r, char *param, const uint64_t *special)
{
	for (ptx_step *s = k->steps; s < k->steps + k->n_steps; s++) {
		if (s->guard >= 0 && !r[s->guard])
			continue;
		uint64_t a, b, c;
		switch (s->op) {
		case PTX_RETURN: return 1;
		case PTX_BRANCH: s = k->steps + s->dst[0] - 1; continue;
		case PTX_SPECIAL: r[s->dst[0]] = special[s->offset]; continue;
		case PTX_SPLIT: a = r[s->dst[2]], r[s->dst[0]] = a & 0xffff, r[s->dst[1]] = a >> 16; continue;
		case PTX_JOIN: r[s->dst[2]] = r[s->dst[0]] | r[s->dst[1]] << 16; continue;
		case PTX_LOAD:
		case PTX_STORE:
			if (!ptx_access(s, r, param))
				return 0;
			continue;
		}
		a = s->src[0].reg >= 0 ? r[s->src[0].reg] : s->src[0].constant;
		b = s->src[1].reg >= 0 ? r[s->src[1].reg] : s->src[1].constant;
		c = s->src[2].reg >= 0 ? r[s->src[2].reg] : s->src[2].constant;
		enum { FIRST = __COUNTER__ + 1 };
		switch (s->op) {
#define X(name, value) case __COUNTER__ - FIRST: r[s->dst[0]] = (value); break;
		OPERATIONS
#undef X
		}
	}
	return 0;
}

static int ptx_run(ptx_kernel *k, void **params, unsigned blocks, unsigned threads)
{
	static _Thread_local uint64_t registers[4096];
	char param[512];
	for (int i = 0; i < k->n_parameters; i++)
		memcpy(param + k->parameters[i].offset, params[i], k->parameters[i].size);
	for (unsigned block = 0; block < blocks; block++)
		for (unsigned thread = 0; thread < threads; thread++)
			if (!ptx_thread(k, registers, param, (uint64_t[]){thread, threads, block, blocks}))
				return 0;
	return 1;
}
