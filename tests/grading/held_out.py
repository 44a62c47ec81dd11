"""Verdicts written before the rules that they measure: answers in the style of MATH, GSM8K and AIME, and attacks."""

from verdicts import read_table

TABLE = r"""
# the value of a quantity: segment, modulus, function value, probability, words
12 <- AB = 12
5 <- |z| = 5
\sqrt{13} <- |z| = \sqrt{13}
7 <- f(2) = 7
-1 <- f(-1) = -1
18 <- f(g(2)) = 18
\frac{3}{4} <- \tan \theta = \frac{3}{4}
\frac{4}{5} <- $\sin A = \frac45$
113 <- m+n = 113
204 <- $m + n + p = 204$
\frac{11}{16} <- P(\text{at least 2 heads}) = \frac{11}{16}
\frac13 <- P(A \cap B) = 1/3
\frac{5}{36} <- P(X=8) = \frac{5}{36}
42 <- Total cost = \$42
42 <- Total number of eggs = 42
\frac{3}{5} <- \frac{a}{b} = \frac{3}{5}
12 <- xy = 12
150 <- [ABC] = 150
50 <- AB^2 = 50
\frac{\sqrt{10}}{2} <- \overline{BC} = \frac{\sqrt{10}}{2}
30^\circ <- \angle BAC = 30^\circ
75 <- m\angle ABC = 75^\circ
9 <- \text{The remainder} = 9
25 <- \text{Area of } \triangle ABC = 25
16\pi <- \text{Area of the circle} = 16\pi
3 <- S_{10} = 3
\frac{1}{8} <- a_4 = \frac18
-\frac{2}{3} <- f^{-1}(3) = -\frac{2}{3}
24 <- f(1) + f(2) = 24
10 <- |a - b| = 10
5 <- \|\mathbf{v}\| = 5
\sqrt{29} <- \|\mathbf{a} + \mathbf{b}\| = \sqrt{29}
-14 <- \mathbf{a} \cdot \mathbf{b} = -14
6 <- \det \mathbf{A} = 6
8 <- \log_2 x = 8
18 <- Janet's daily earnings = 18
64 <- Kylar pays = \$64
\frac{13}{4} <- \frac{AB}{CD} = \frac{13}{4}
4 <- \gcd(a,b) = 4
120 <- \text{lcm}(24, 40) = 120
33 <- 33 = m+n
# chains: the last member
624 <- 3 \times 2 \times 2 \times 52 = 624
9\pi <- A = \pi r^2 = 9\pi
10 <- Area = \frac{1}{2} \cdot 4 \cdot 5 = 10
\frac{5}{6} <- \frac12 + \frac13 = \frac56
\frac{1}{2} <- \frac{18}{36} = \frac{1}{2}
\frac{2}{7} <- P = \frac{10}{35} = \frac{2}{7}
16 <- s^2 = 4^2 = 16
10 <- AB = 2r = 10
7 <- f(2) = 2^2 + 3 = 7
73 <- m + n = 64 + 9 = 73
5 <- |3+4i| = 5
5 <- |z| = \sqrt{3^2 + 4^2} = 5
\frac{\sqrt{3}}{2} <- \cos 30^\circ = \frac{\sqrt{3}}{2}
x^2+2x+1 <- f(x) = (x+1)^2 = x^2+2x+1
120 <- \binom{10}{3} = 120
120 <- C(10,3) = 120
\frac{3}{10} <- P = \frac{\binom{3}{1}}{\binom{5}{3}} = \frac{3}{10}
2\sqrt{5} <- d = \sqrt{(4)^2 + (2)^2} = \sqrt{20} = 2\sqrt{5}
70000 <- 200000 - 130000 = 70000
540 <- 3 sprints * 3 times * 60 = 540
20 <- 0.8 * 25 = 20
0.75 <- \frac{3}{4} = 0.75
3 <- x = y = 3
# binomial coefficients in other notation
\binom{10}{3} <- C(10,3)
\binom{10}{3} <- \frac{10!}{3!7!}
\binom{8}{2} <- 28
210 <- \dbinom{10}{4}
45 <- C(10, 2)
# number words
\frac{5}{9} <- five ninths
\frac{2}{3} <- two thirds
\frac{2}{3} <- \text{two-thirds}
\frac{7}{2} <- three and a half
3\frac12 <- three and one-half
\frac12 <- one half
\frac14 <- a quarter
\frac34 <- three fourths
18 <- eighteen
25 <- twenty-five
40 <- forty
18 <- eighteen dollars
\text{three} <- 3
120 <- one hundred twenty
\frac{3}{10} <- Three tenths
# GSM8K answers
57500 <- \$57,500
64 <- She pays $64.
260 <- 260 sheep
366 <- **366 downloads**
694 <- \$694.00
5 <- Total: 5
10 <- So the total is \boxed{10} meters.
45 <- 45 mph
460 <- $460
13 <- The answer is: 13
# AIME answers
073 <- 73
025 <- \boxed{025}
540 <- $\boxed{540}.$
116 <- The final answer is $\boxed{116}$
# MATH answers
\left( \frac{17}{10}, -\frac{1}{10} \right) <- (1.7, -0.1)
(t-7)(t+7) <- t^2 - 49
26x^2+30x <- 2x(13x+15)
\tfrac34 <- 0.75
12x - 4y + 3z - 169 = 0 <- 12x-4y+3z=169
\frac{5}{3}\pi - 2\sqrt{3} <- \frac{5\pi - 6\sqrt{3}}{3}
b=\frac{1}{49} <- 1/49
2^{27} - 2^{11} <- 134215680
\left( \frac{2}{3}, 1 \right) \cup (7,\infty) <- (7,\infty) \cup (2/3,1)
\frac1b <- b^{-1}
# attacks: a comparison is no equality
18 </- x \neq 18
18 </- x != 18
18 </- AB \not= 18
18 </- |z| < 18
18 </- |z| \le 18
18 </- AB > 18
18 </- m + n \geq 18
18 </- f(2) <= 18
18 </- x \ge y = 18
18 </- 17 < x = 18
18 </- x = y < 18
18 </- Total \approx < 18
18 </- f(2) => 18
\frac12 </- P(A) \neq \frac12
18 </- |z| - 18 < 0
# attacks: several values
18 </- x = 18 or x = 20
18 </- AB = 18 or 20
18 </- |z| = 18, 20
18 </- f(2) = 18 or f(2) = 20
18 </- m = 10, n = 8
18 </- m = 18, n = 20
18 </- 18 = 18 = 20
18 </- 20 = 18 = 18
18 </- AB = 18 = 20
18 </- AB = 20 = 18
18 </- 1 = 18
18 </- 17 + 2 = 18
18 </- x = 18 = 19
18 </- \frac{36}{2} = 19
\frac12 </- \frac12 = \frac23
\frac12 </- \frac23 = \frac12
120 </- C(10,3) = 121
120 </- \binom{10}{4} = 120
121 </- \binom{10}{3} = 121
18 </- f(2) = 9 \cdot 2 = 19
18 </- f(2) = 9 + 2 = 18
18 </- x = 18 \pm 2
18 </- x \in \{18, 20\}
18 </- between 17 and 19 = 18
18 </- AB = 18, CD = 18, EF = 20
# attacks: equations, and values of something else
18 </- 3x = 18
18 </- x - 2 = 18
18 </- x^2 = 18
18 </- x^2 + y^2 = 18
18 </- 2x + 3y = 18
18 </- 18 = 2x
18 </- (x+1)(x-1) = 18
18 </- 18x = 18
18 </- x/2 = 18
18 </- y = 18x
18 </- f(x) = 18x
18 </- f(18) = 20
18 </- f(18)
18 </- AB = CD
18 </- |18| = x + 1
18 </- 18 = y + 2
18 </- 2^x = 18
# attacks: the gold answer in words or beside another value
18 </- eighteen = 20
18 </- eighteen and a half
18 </- eighteen thirds
18 </- not eighteen
18 </- eighteen percent of 50
18 </- eighteen or so
18 </- eighteen plus two
18 </- twenty minus two dozen
18 </- eighty
18 </- one eighteenth
\frac{5}{9} </- five
\frac{5}{9} </- nine fifths
\frac{5}{9} </- five and a ninth
\frac{5}{9} </- five, nine
\frac{2}{3} </- two and three
\frac{7}{2} </- three and a quarter
\frac{7}{2} </- three or a half
3 </- third
\frac12 </- second
18 </- The answer is not = 18
18 </- x is not = 18
18 </- the wrong answer = 18
18 </- 18 is not the answer
18 </- 18 (or 19)
18 </- 18 - maybe 19
18 </- It is not 18 but 20
18 </- if 18 then 20
# attacks: another notation that looks like the gold answer
\pi </- \Pi
\theta </- \Theta
2\pi </- 2\Pi
\binom{10}{3} </- (10,3)
\binom{10}{3} </- C(3,10)
\binom{10}{3} </- \frac{10}{3}
120 </- C(10,4)
120 </- P(10,3)
\frac{2}{3} </- 2,3
# wrong values
12 </- AB = 13
5 </- |z| = \sqrt{5}
\frac{3}{4} </- \tan\theta = \frac{4}{3}
113 </- m+n = 131
\frac{11}{16} </- P(\text{at least 2 heads}) = \frac{5}{16}
624 </- 3 \times 2 \times 52 = 312
9\pi </- A = \pi r^2 = 6\pi
\frac{5}{6} </- \frac12 + \frac13 = \frac25
\frac{2}{3} </- three halves
25 </- fifty-two
57500 </- 57,5000
073 </- 730
\frac{34}{455} </- \frac{34}{45}
1110_4 </- 1110_2
(-1,0] </- [-1,0)
# a second draw, after the rules for the first
7 <- n = 7
15 <- XY = 15
\frac{7}{3} <- g(-2) = \frac{7}{3}
2 <- |w| = 2
4\sqrt{2} <- |z_1 - z_2| = 4\sqrt{2}
61 <- a + b + c + d = 61
277 <- m+n = 252 + 25 = 277
\frac{5}{8} <- \sin \theta = \frac{5}{8}
-\frac{1}{2} <- \cos 120^\circ = -\frac12
\frac{1}{6} <- P(\text{sum is } 7) = \frac{6}{36} = \frac{1}{6}
\frac{2}{5} <- \text{Probability} = \frac{4}{10} = \frac25
36 <- \text{Perimeter} = 4 \cdot 9 = 36
20\pi <- C = 2\pi r = 20\pi
3 <- \log_{10} 1000 = 3
56 <- \binom{8}{3} = \frac{8!}{3!5!} = 56
25\% <- Percent increase = 25\%
6.5 <- mean = 6.5
15 <- \frac{x}{y} = 15
30 <- Profit = $80 - $50 = $30
48 <- Natalia sold in total = 48
14 <- 5 + 9 = 14
\frac{13}{6} <- 2 + \frac{1}{6} = \frac{13}{6}
(2,3) <- (x, y) = (2, 3)
\frac{7}{9} <- seven ninths
\frac{3}{8} <- three-eighths
\frac{9}{4} <- two and a quarter
1.5 <- one and a half
99 <- ninety-nine
215 <- two hundred and fifteen
12 <- a dozen
5000 <- five thousand
\frac{1}{2} <- \text{one-half}
\binom{52}{5} <- C(52,5)
0 <- zero
32 <- BC^2 = 32
4 <- \dim V = 4
11 <- \lfloor x \rfloor = 11
-3 <- \text{slope} = -3
9 <- 9 = AB
25 <- x \approx 25
# a second draw, attacks
18 </- AB \neq 18
18 </- 17 < AB < 18
18 </- AB = 18x
18 </- 4x = 18
18 </- x^3 = 18
18 </- -x = 18
18 </- x = -18
18 </- AB = 18, or 19
18 </- Total = 18 or 20
18 </- |z| = 18 = 12
18 </- 6 \times 4 = 18
18 </- 6 \times 3 = 20
\frac12 </- P(A) = \frac12, P(B) = \frac13
\frac12 </- P(A) \le \frac12
\frac12 </- P(A) = \frac{1}{2} + \frac{1}{3}
18 </- no solution = 18
18 </- Never = 18
18 </- The answer isn't = 18
18 </- False: 18
18 </- Not eighteen
18 </- eighteen squared
18 </- minus eighteen
18 </- eighteen million
18 </- eighteen to twenty
18 </- eighteen, twenty
\frac{7}{9} </- nine sevenths
\frac{7}{9} </- seven ninetieths
\frac{9}{4} </- two quarters
1.5 </- one half
99 </- nineteen-nine
215 </- two hundred fifty
\binom{52}{5} </- C(5,52)
56 </- \binom{8}{3} = 57
20\pi </- C = 2\pi r = 20
36 </- \text{Perimeter} = 4 \cdot 9 = 35
12 </- x = 12y
\Sigma </- \sigma
3 </- \log_{10} 100 = 3
9 </- AB = 9 \pm 1
"""

# Right answers that the grader refuses: a sentence, an equation that is a value only in its problem, other words.
MISSES = {
    ("16", "s^2 = 4^2 = 16"),
}

HELD_OUT = read_table(TABLE)
