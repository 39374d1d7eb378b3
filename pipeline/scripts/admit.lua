#!lua
-- Admits one request: guarantees that its state and its entry in the tokenizer's stream appear together, that
-- an id is accepted once, and that the door is closed while max_queue requests of this priority are in front
-- of prefill. Without allow-oom: a server at its memory limit refuses the whole script, so the door closes
-- first and what is inside can drain.
--
-- KEYS  request, tokenizer stream, prefill stream
-- ARGV  ticket (names this call, so that sending it again is not taken for a second request), max_queue, payload,
--       attempt of the payload ('0' where none is given): larger than that of any request before under this id, so
--       that entries of that one which are still in a stream are refused
-- reply 'accepted' | 'exists' | 'busy'
local request, tokenizer, prefill = KEYS[1], KEYS[2], KEYS[3]
local ticket, max_queue, payload = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local attempt = ARGV[4] or '0'

if redis.call('EXISTS', request) == 1 then
  return redis.call('HGET', request, 'ticket') == ticket and 'accepted' or 'exists'
end
-- Acknowledged entries are deleted, so the length is what waits and what is in work.
if redis.call('XLEN', tokenizer) + redis.call('XLEN', prefill) >= max_queue then
  return 'busy'
end
redis.call('HSET', request, 'state', 'queued', 'attempt', attempt, 'n', '0', 'ticket', ticket)
redis.call('XADD', tokenizer, '*', 'p', payload)
return 'accepted'
