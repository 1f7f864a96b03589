/* Shadow memory: who touched which byte last. order.c says who and when; shadow.c keeps it. Not thread-safe by itself. */
#ifndef ASCEND_EMULATOR_SHADOW_H
#define ASCEND_EMULATOR_SHADOW_H

#include "emulator.h"

#define ACCESS_DIMS 8

/* One tensor of one operator, as its issuer described it. Texts are never freed. */
typedef struct {
    const char *operator_name, *argument, *dtype;
    int64_t write, stream, device, dims;
    int64_t sizes[ACCESS_DIMS];
    uint64_t address, sequence;
    int64_t place; /* graph << 32 | node + 1, 0 outside of replays */
} Description;

typedef struct {
    int references;
    int lane;
    Stamp stamp;
    Description what;
} Access;

typedef struct Shadow Shadow;

/* An access that is being made; `made` is NULL until a byte has to remember it. */
typedef struct {
    const Actor *actor;
    const Description *what;
    int probe; /* look only */
    Access *made;
    struct State *written, *first_read; /* states of bytes that nobody else touched since */
    struct State *from, *to;            /* the last state that a read was added to, and what came of it */
    struct Page *page;                  /* where the last run was, and behind which span: views go upwards */
    int at;
    const Access *other;                /* after a conflict: with whom, which bytes */
    Description earlier;
    uint64_t low, high;
} Touch;

Shadow *shadow_new(void);
void shadow_free(Shadow *shadow);
int shadow_touch(Shadow *shadow, Touch *touch, uint64_t low, uint64_t high); /* 1: conflict */
void touch_end(Touch *touch);
void shadow_drop(Shadow *shadow, uint64_t low, uint64_t high);
void shadow_forget(Shadow *shadow, uint64_t low, uint64_t high, int lane);

#endif
